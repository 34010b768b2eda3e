"""How many replicas a service should have. Pure."""
