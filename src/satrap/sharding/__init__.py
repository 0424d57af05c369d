"""Which server owns which rows, and how many servers a run should have. Pure: no process is called."""
