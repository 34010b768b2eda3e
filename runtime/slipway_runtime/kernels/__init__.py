"""Arithmetic on tensors. `reference` defines it; other implementations are claims about the reference."""
