"""The gateway: one OpenAI-compatible endpoint for all services, which routes requests to replicas."""
