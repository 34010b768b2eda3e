"""Models: configuration, checkpoint and adapter loading, quantization, and the decoder."""
