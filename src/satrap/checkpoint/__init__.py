"""Checkpoints of a training run, in a local folder or under a URL."""
