"""The operator: reads the cluster, decides in the pure `core`, and writes the decisions to the API server."""
