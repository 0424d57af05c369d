"""`python -m benchmarks.store`: Satrap's table beside its peers: speed, memory, growth, snapshots."""
