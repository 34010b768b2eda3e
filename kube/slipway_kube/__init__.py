"""Kubernetes over the wire, for the operator and the gateway; nothing of kopf."""
