"""Benchmarks of Slipway: `python -m bench` runs them all; every ratio is against a peer in the same run."""
