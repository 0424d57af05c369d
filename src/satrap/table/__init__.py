"""A table in this process: one native engine holds its rows; saved and loaded as snapshots."""
