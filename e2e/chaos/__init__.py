"""The fault matrix: faults injected under load, while a client compares every text (`make chaos`)."""
