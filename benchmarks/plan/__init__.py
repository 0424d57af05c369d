"""Predictions of the planner against real runs on this machine."""
