"""Compute kernels: attention, norms, sampling, LoRA, experts. `reference` defines the results of all others.

`dispatch.kernels_for` chooses one of five implementations of the same functions:

    reference         plain torch: the definition, and the fallback on a CPU
    cpu               compiled C++ (`native`), for float32 on a CPU
    fixed_order       plain torch, with a fixed order of sums: `deterministic`, where nothing is compiled
    gpu               Triton, on CUDA devices
    gpu_fixed_order   the same with ordered attention: `deterministic` on CUDA devices
"""

import os

# Triton kernels multiply and add in one rounding, whatever the default of the installed Triton (3.10 changes it): their
# bits, their speed and the tolerances of their tests depend on it.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
