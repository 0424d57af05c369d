"""Monitoring of a run: metrics, reports of an interval, and the sinks that show them."""
