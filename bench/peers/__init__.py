"""Other engines on the same checkpoint, prompts and threads: each in its own environment, driven by one contract."""
