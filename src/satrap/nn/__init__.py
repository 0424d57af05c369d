"""Modules that stand in for torch's in a model whose code stays as it is: their rows are those of Satrap's tables."""

try:
    from satrap.nn.embedding import Embedding, EmbeddingBag
except ModuleNotFoundError as error:
    raise ImportError(f"satrap.nn needs {error.name}: pip install 'satrap[train]'", name=error.name) from error

__all__ = ["Embedding", "EmbeddingBag"]
