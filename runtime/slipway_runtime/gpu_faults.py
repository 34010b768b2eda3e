"""Recognises CUDA errors that mean a failed GPU, not a bug in the program.

An illegal memory access or a failed assertion is a bug of ours: the same GPU computes on after a restart. The faults
listed here survive a restart in place: the operator replaces the replica, preferably on another node.
"""

from typing import Final

# In the words of `cudaGetErrorString`, and of the drivers for the corresponding Xids.
_FAULTS: Final = (
    "uncorrectable ecc error",  # Xid 48, 63, 64, 94, 95
    "uncorrectable nvlink error",  # Xid 74
    "hardware stack error",
    "gpu is lost",
    "gpu has fallen off the bus",  # Xid 79
    "no cuda-capable device is detected",
    "cuda-capable device(s) is/are busy or unavailable",
    "device requires reset",
    "unable to determine the device handle",
    "system not yet initialized",  # the fabric manager is not running
    "contained memory error",
)


def is_gpu_fault(error: str) -> bool:
    """Whether an error message names a failure of the GPU."""
    lowered = error.lower()
    return any(fault in lowered for fault in _FAULTS)
