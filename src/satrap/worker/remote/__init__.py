"""A worker in a process of its own: the calls between it and its trainers, and both sides of them."""
