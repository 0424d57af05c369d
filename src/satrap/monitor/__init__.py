"""What a person sees of a run: metrics, reports of an interval, and where they go."""
