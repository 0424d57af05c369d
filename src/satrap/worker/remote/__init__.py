"""A remote worker, in its own process: the protocol between it and its trainers, and both sides of it."""
