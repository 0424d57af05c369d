"""Benchmarks: programs that print one JSON line per case, each measured beside its peers in the same run."""
