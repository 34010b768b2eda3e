"""The local cluster, and the stories told on it."""
