"""The layers of a transformer, for inference: weights and a call, nothing to train."""
