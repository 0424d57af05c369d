"""Read-only access to rows: of live servers, of a run's newest checkpoint, or of a snapshot."""
