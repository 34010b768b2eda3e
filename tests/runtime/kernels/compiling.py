"""Compiles real kernels and a library in a process of its own, once for each run that is read from standard input.

This process compiles for a GPU that it does not have; the tests' process interprets kernels and could not.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
KERNELS = ("_rms_norm", "_swiglu")
LIBRARY = "int slipway_answer(void) { return 42; }\n"
CARD = "NVIDIA H100 80GB HBM3 9.0"


def start(*runs: dict[str, Any]) -> "subprocess.Popen[str]":
    """Start a process that does these runs; `ended` has its results."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.kernels.compiling"],
        cwd=ROOT,
        env=clean,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(runs))
    process.stdin.close()
    process.stdin = None
    return process


def ended(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What the runs compiled and what they got."""
    output, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def compiled(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of these runs, one after the other in a process."""
    return ended(start(*runs))


def main() -> None:
    from triton import knobs
    from triton.runtime import build

    from bench.gpu_launches import Recorder, compile_launch, record

    recorder = Recorder()
    record(recorder, 90, "SmolLM2-135M", "bf16", "auto", ())
    launches = {launch.kernel: launch for launch in recorder.launches.values() if launch.kernel in KERNELS}
    compiles: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiles.append(src.name)

    knobs.compilation.listener = listen
    make_library = build._build

    def counted(name: str, *arguments: Any, **options: Any) -> str:
        compiles.append(name)
        return make_library(name, *arguments, **options)

    build._build = counted
    results = []
    for run in json.load(sys.stdin):
        compiles.clear()
        store = _use(run)
        got = {name: compile_launch(launches[name]) for name in KERNELS}
        library = Path(build.compile_so_from_src(LIBRARY, "answer"))
        results.append(
            {
                "compiled": sorted(compiles),
                "got": {name: [_digest(one.asm["cubin"]), one.metadata.shared] for name, one in got.items()},
                "library": _digest(library.read_bytes()),
                "private": library.is_relative_to(run["private"]),
                "counts": [store.counts.compiled, store.counts.shared, store.counts.refused] if store else None,
                "fault": store.fault if store else "",
            }
        )
    print(json.dumps(results))


def _use(run: dict[str, Any]) -> Any:
    import triton
    from triton import knobs

    knobs.cache.dir = run["private"]
    if "root" not in run:
        return None
    from slipway_runtime.kernels.compile_cache import toolchain, use
    from slipway_runtime.storage.kernel_store import KernelStore

    own = triton.__version__
    triton.__version__ = run.get("triton", own)
    store = KernelStore(Path(run["root"]), run.get("key", "a key").encode(), toolchain(run.get("card", CARD)))
    triton.__version__ = own
    use(store)
    return store


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
