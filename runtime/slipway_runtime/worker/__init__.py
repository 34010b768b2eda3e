"""Model worker: executes scheduler outputs on one device."""
