"""`satrap deploy render`: the manifests of a training run on Kubernetes, with KubeRay or without."""
