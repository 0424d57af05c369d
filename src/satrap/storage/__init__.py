"""Folders on a disk or under a URL: where snapshots and checkpoints are written and read."""
