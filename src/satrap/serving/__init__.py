"""Rows for reading: of live servers, a run's newest checkpoint, or a snapshot."""
