"""The harness of all benchmarks: cases, processes that measure them in turn, records and the command line."""
