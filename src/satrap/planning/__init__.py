"""What a job needs before it runs: machines, memory, bytes a second, cost. Estimates, no processes of a run."""
