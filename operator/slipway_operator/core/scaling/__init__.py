"""Decides how many replicas a service should have. Pure."""
