"""A real Kubernetes of local processes: `launch.Cluster` starts one, `python -m e2e.cluster` does it from a shell."""
