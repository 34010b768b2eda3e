"""The operator: the shell that observes, executes and reports around the pure core."""
