"""A table on disk: its manifest, its data files, and how it is written and read."""
