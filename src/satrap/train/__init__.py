"""The trainer: embeddings as a module, the stream of batches, the optimizer of both halves of a model."""
