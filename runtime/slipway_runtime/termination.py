"""The termination message of the container, which the operator turns into a condition.

It tells CUDA errors that mean a failed GPU from bugs in the program. An illegal memory access or a failed assertion is
a bug of ours: the same GPU computes on after a restart. The faults listed here survive a restart in place: the operator
replaces the replica, preferably on another node.
"""

import contextlib
from pathlib import Path
from typing import Final

from jinja2 import TemplateError, TemplateSyntaxError

from slipway_api import names
from slipway_runtime.storage.address import shown
from slipway_runtime.storage.source import AccessDeniedError, ModelNotFoundError, UnreachableError

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


TERMINATION_MESSAGE: Final = Path("/dev/termination-log")  # Kubernetes' default path; exists only in a pod


def termination_message(model_uri: str, error: Exception) -> str:
    """The termination message of a pod whose model cannot be served; the operator recognises its prefix."""
    if isinstance(error, ModelNotFoundError):
        return f"{names.WORD_MODEL_NOT_FOUND}{error}"
    if isinstance(error, AccessDeniedError):
        return f"{names.WORD_CREDENTIALS_INVALID}{error}"
    if isinstance(error, UnreachableError):
        return f"{names.WORD_HUB_UNREACHABLE}{error}"
    if isinstance(error, TemplateError):
        line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
        return f"{names.WORD_INVALID_SPEC}spec.model.chatTemplate, or the model's own template: {error.message}{line}"
    if str(error).startswith((names.WORD_DOES_NOT_FIT, names.WORD_INVALID_SPEC)):
        return str(error)
    if is_gpu_fault(str(error)):
        return f"{names.WORD_GPU_FAULT}{error}"
    return f"cannot serve {shown(model_uri)}: {error}"


def engine_death_message(error: str) -> str:
    """The termination message of a pod whose engine has died while it served."""
    prefix = names.WORD_GPU_FAULT if is_gpu_fault(error) else "the engine has died: "
    return f"{prefix}{error}"


def write_termination_message(sentence: str) -> None:
    """Write the termination message; does nothing outside of a pod."""
    if TERMINATION_MESSAGE.exists():
        with contextlib.suppress(OSError):
            TERMINATION_MESSAGE.write_text(sentence[:4000])
