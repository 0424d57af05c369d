"""Which server owns which rows, and how many servers a run needs. Pure: calls no process."""
