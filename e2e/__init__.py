"""The local cluster, the user stories that run on it, and the fault matrix."""
