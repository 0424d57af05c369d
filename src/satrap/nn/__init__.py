"""Modules that stand in for torch's in a model whose code stays as it is: their rows are those of Satrap's tables."""

from satrap.nn.embedding import Embedding, EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag"]
