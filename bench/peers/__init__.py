"""Drivers of other engines for `bench.engine`: same checkpoint, prompts and threads, each in its own environment."""
