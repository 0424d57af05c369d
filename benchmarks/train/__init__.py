"""`python -m benchmarks.train`: whole training steps of a DLRM beside its peers, and the part that embeddings take."""
