"""Buckets that move from one server to another while training goes on."""
