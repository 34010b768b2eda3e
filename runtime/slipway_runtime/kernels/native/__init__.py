"""Compiled CPU kernels: loads the best library in this folder for this processor, and declares its functions.

The libraries are built with the package (`compile`), for x86 and ARM processors. Without a compiler, or on another
processor, there is no library, and `reference` computes instead. `cpu` calls the functions with torch's tensors.

Threads: the libraries use torch's own OpenMP, so that there is one pool of threads in the process.
"""

import ctypes
import platform
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import structlog
import torch

log = structlog.get_logger()
_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "set_threads": (_I,),
    "pack": (_P, _P, _I, _I),
    "linear": (_P, _P, _P, _I, _I, _I),
    "pack_widened": (_P, _P, _I, _I),
    "linear_widened": (_P, _P, _P, _I, _I, _I),
    "pack_bf16": (_P, _P, _I, _I),
    "linear_bf16": (_P, _P, _P, _P, _I, _I, _I),
    "rms_norm": (_P, _P, _P, _I, _I, _F),
    "add_rms_norm": (_P, _P, _P, _P, _I, _I, _F),
    "swiglu": (_P, _P, _I, _I),
    "geglu": (_P, _P, _I, _I),
    "rope_and_store": (_P, _P, _P, _I, _P, _I, _P, _P, _P, _F, _I, _I, _I, _I, _I),
    "decoder_layer": (_P, _P, _P, _P, _P, _P, _I, _P),
    "add_lora": (_P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _P, _I),
    "attend_pages": (_P, _I, _P, _I, _P, _P, _I, _P, _I, _P, _I, _I, _I, _I, _F, _I, _F, _P, _I),
}
_BYTES_SIGNATURES: dict[str, tuple[type, ...]] = {  # only in libraries for processors that multiply bytes
    "pack_bytes": (_P, _P, _P, _I, _I),
    "linear_bytes": (_P, _P, _P, _P, _P, _P, _I, _I, _I),
}
# Functions that return a number: sizes of packed weights (outputs and inputs with padding), bytes of scratch memory.
_SIZES: dict[str, tuple[type, ...]] = {
    "padded_outputs": (_I,),
    "padded_widened_inputs": (_I,),
    "padded_bf16_outputs": (_I,),
    "padded_bf16_inputs": (_I,),
    "bf16_scratch": (_I, _I),
    "layer_scratch": (_P, _I),
}
_BYTES_SIZES: dict[str, tuple[type, ...]] = {
    "padded_byte_outputs": (_I,),
    "padded_byte_inputs": (_I,),
    "bytes_scratch": (_I, _I),
}


class Native(ctypes.CDLL):
    """A library of compiled kernels. The C++ sources document each function; pointers are not checked."""

    multiplies_bytes: bool
    rounds_to_bf16: bool  # rows that bfloat16 weights multiply are rounded to bfloat16

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded here."""
        super().__init__(str(path))
        self.multiplies_bytes = hasattr(self, "linear_bytes")
        for name, arguments in (_SIGNATURES | (_BYTES_SIGNATURES if self.multiplies_bytes else {})).items():
            function = getattr(self, name)
            function.argtypes, function.restype = arguments, None
        for name, arguments in (_SIZES | (_BYTES_SIZES if self.multiplies_bytes else {})).items():
            function = getattr(self, name)
            function.argtypes, function.restype = arguments, _I
        self.rounds_to_bf16 = self.bf16_scratch(1, 1) > 0


@cache
def library() -> Native | None:
    """The best library for this processor, or None."""
    for name in fitting():
        try:
            return Native(Path(__file__).parent / f"{name}.so")
        except OSError:
            continue
        except AttributeError as missing:
            log.warning(
                "the compiled kernels are older than their sources, the reference computes instead: run "
                "python -m slipway_runtime.kernels.native.compile",
                library=name,
                reason=str(missing),
            )
            continue
    return None


def fitting() -> list[str]:
    """The names of the libraries that this processor runs, the best first."""
    names = []
    if platform.machine() in ("aarch64", "arm64"):
        features = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        return ["neon_dotprod", "neon"] if "asimddp" in features else ["neon"]
    if torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported():
        if torch.cpu._is_avx512_bf16_supported():
            # The kernel must permit a process to use tiles (`arch_prctl`), and some sandboxes do not.
            if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
                names.append("amx")
            names.append("avx512_bf16")
        names.append("avx512")
    if torch.cpu._is_avx2_supported():
        names.append("avx2")
    return names


def set_threads(count: int) -> None:
    """Set the number of threads of later calls."""
    if (found := library()) is not None:
        found.set_threads(count)
