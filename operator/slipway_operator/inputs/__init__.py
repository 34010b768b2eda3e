"""The inputs of decisions: watch caches of the cluster, and samples of the replicas' load."""
