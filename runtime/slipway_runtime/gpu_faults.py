"""Which errors of CUDA say that the GPU itself failed, and not the program.

An illegal memory access or a failed assertion is a bug of ours: the same GPU computes on after a restart. What is
listed here is not mended by a restart in place: the operator replaces the replica, preferably on another node.
"""

from typing import Final

# As `cudaGetErrorString` words them, and as drivers word the Xids behind them.
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
    "system not yet initialized",  # the fabric manager does not run
    "contained memory error",
)


def is_gpu_fault(error: str) -> bool:
    """Whether the sentence of an error names a failure of the GPU."""
    lowered = error.lower()
    return any(fault in lowered for fault in _FAULTS)
