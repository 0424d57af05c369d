"""A worker in a process of its own: the protocol between it and its trainers, and both sides of it."""
