"""The embedding worker: looks up the ids of a batch and sends its gradients back, to rows here or on servers."""
