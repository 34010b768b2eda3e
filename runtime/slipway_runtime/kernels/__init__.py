"""Compute kernels: attention, norms, sampling, LoRA, experts. `reference` defines the results of all others."""
