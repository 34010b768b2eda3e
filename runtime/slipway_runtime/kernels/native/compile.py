"""Compiles the CPU kernels for x86 and ARM processors: run when the package is built, and by hand after an edit.

Without a compiler, or on another processor, nothing is built, and the package works without. No torch: it is not
installed at build time. OpenMP's symbols are left undefined, and resolve in the process to torch's own OpenMP.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("linear.cpp", "linear_bf16.cpp", "linear_bytes.cpp", "rows.cpp", "attention.cpp", "lora.cpp", "layer.cpp")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")
# By the processor that builds: flags of each library, the best first.
_Flags = dict[str, tuple[str, ...]]  # of each library
_X86: _Flags = {
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
_ARM: _Flags = {
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon": ("-march=armv8-a",),
}
_BY_MACHINE: dict[str, _Flags] = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
LIBRARIES: _Flags = _BY_MACHINE.get(platform.machine(), {})
# No flag that lets sums be reordered: a row's result must not depend on how the compiler unrolled a loop.
_FLAGS = (
    "-O3 -std=gnu++17 -fPIC -fopenmp -fvisibility=hidden -fno-exceptions -fno-rtti -fno-math-errno -fno-trapping-math "
    "-Wall -Wextra -Wno-maybe-uninitialized -Wno-psabi"
)


def build(folder: Path = HERE, *, machine: str | None = None, compiler: str | None = None) -> list[Path]:
    """Build every library of a machine, by default this one, into a folder.

    Raises OSError or subprocess.CalledProcessError, with the compiler's words.
    """
    compiler = compiler or os.environ.get("CC", "cc")
    built = []
    for name, processor in (LIBRARIES if machine is None else _BY_MACHINE[machine]).items():
        objects = []
        for source in SOURCES:
            compiled = folder / f"{name}-{source}.o"
            command = [
                compiler,
                "-x",
                "c++",
                *_FLAGS.split(),
                *processor,
                "-c",
                str(HERE / source),
                "-o",
                str(compiled),
            ]
            subprocess.run(command, check=True, capture_output=True, text=True)
            objects.append(compiled)
        library = folder / f"{name}.so"
        # Linked under another name, then renamed: a running process keeps its old library.
        fresh = library.with_suffix(".new")
        _run(compiler, "-shared", *map(str, objects), "-lm", "-o", str(fresh))
        fresh.replace(library)
        for compiled in objects:
            compiled.unlink()
        built.append(library)
    return built


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    try:
        build()
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)
