"""Checkpoints in, decoders out."""
