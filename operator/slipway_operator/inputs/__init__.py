"""What is observed: watches of the cluster and samples of the replicas."""
