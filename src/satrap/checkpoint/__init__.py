"""Checkpoints of a whole training run, in a folder or under a URL."""
