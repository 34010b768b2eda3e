"""The fault matrix: faults injected under load, with a client that compares every text (`make chaos`)."""
