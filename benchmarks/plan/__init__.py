"""`python -m benchmarks.plan`: predictions of the planner against real runs on this machine."""
