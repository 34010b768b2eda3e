"""Compiles every Triton kernel for GPUs on a machine without one, and checks the code: `python -m bench.gpu_compile`.

Compiles what `bench.gpu_launches` records with the assembler that Triton brings along, and reads registers, stack
(spilled registers lie there), shared memory, tensor-core instructions and the widths of loads from the result.
Exits with 1 where a launch does not compile, spills, does not fit into shared memory, or multiplies 16-bit matrices
without tensor cores. `--sample` compiles a few launches, and `--quick` those of the sample that stand for the others
(`bench.gpu_sample`), in `make test`. `--ledger FILE` writes the launches of the sample into docs/gpu-ledger.md, or
without `--sample` the summary of all.
Compiled code is cached beside the local cluster's binary, by the hash of all that it is made of: a second checkout
compiles only what it changed. Nothing is timed here: `bench.gpu` does that, on a GPU.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_sample import stand_ins
from e2e.cluster.paths import cache_folder
from slipway_runtime.kernels.tiles import shared_bytes

if TYPE_CHECKING:
    from bench.gpu_launches import Launch  # it imports torch and Triton

TARGETS = (80, 89, 90, 100, 120)
# With 99 KiB of shared memory a block, and so with other tiles of attention. The sample has nothing else of them.
SMALLER = (89, 120)
# Of a multiprocessor: 1 KiB of shared memory beside what a block may have, warps and blocks. The CUDA guide's tables.
WARPS_PER_SM, BLOCKS_PER_SM = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}, {86: 16, 89: 24, 120: 24}
REGISTERS_PER_SM = 1 << 16
# Bytes that may be spilled: a prompt's attention is bound by tensor cores, and on an H100 the fastest tile of 13 spills
# 184. All others may put some words aside before a loop and read them behind it, as the assembler likes to. Within a
# loop one may be read: int8 keys with fp16 queries do, and a smaller tile, without it, has more instructions a key.
SPILLS_OF_PROMPTS, PUT_ASIDE = 256, 16
# Decode with int8 keys, by one warp: 71 µs for 32 rows of 2,048 on an H100, and 83 by two warps. fp8 spills nothing.
SPILLS_OF_QUANTIZED_DECODE = 192


@dataclass
class Compiled:
    """The compiled code of one launch: its resources and its faults."""

    kernel: str
    target: int
    case: str
    cases: int
    constants: dict[str, str]
    warps: int
    stages: int
    error: str = ""
    registers: int = 0
    spilled: int = 0  # bytes of stack a thread
    spills_in_loops: int = 0  # instructions within a loop that read or write the stack
    shared: int = 0  # bytes a block
    blocks: int = 0  # resident on a multiprocessor
    tensor_cores: str = ""  # the instruction, empty: none
    models: list[str] = field(default_factory=list)  # whose launches compile to this code
    loads: dict[int, int] = field(default_factory=dict)  # bits -> instructions; copies to shared memory included
    faults: list[str] = field(default_factory=list)
    compiled: bool = True  # False: recorded only, another launch stands for it


def recorded(launch: "Launch") -> Compiled:
    """A launch before it is compiled."""
    constants = {name: str(value) for name, value in launch.constants.items()}
    warps, stages = launch.options["num_warps"], launch.options["num_stages"]
    return Compiled(
        launch.kernel, launch.target, launch.case, len(launch.cases), constants, warps, stages, compiled=False
    )


def _compile(key_and_launch: tuple[str, object]) -> tuple[str, dict[str, object]]:
    from bench.gpu_launches import EDGES, MODELS, Launch, compile_launch

    key, launch = key_and_launch
    assert isinstance(launch, Launch)
    result = recorded(launch)
    result.compiled = True
    result.models = sorted({name for name in MODELS | EDGES for case in launch.cases if case.startswith(f"{name} ")})
    try:
        kernel = compile_launch(launch)
    except BaseException as error:  # noqa: BLE001  whatever stops the compiler is the finding
        result.error = f"{type(error).__name__}: {error}"[-1500:]
        result.faults.append("does not compile")
        return key, asdict(result)
    result.shared = kernel.metadata.shared
    result.registers, result.spilled = _resources(kernel.asm["cubin"])
    result.spills_in_loops = _spills_in_loops(kernel.asm["cubin"]) if result.spilled else 0
    result.tensor_cores, result.loads = _instructions(kernel.asm["ptx"])
    result.blocks = _resident(result)
    if spills_too_much(result):
        result.faults.append(f"spills {result.spilled} bytes, {result.spills_in_loops} instructions in loops")
    if result.shared > shared_bytes(result.target):
        result.faults.append(f"needs {result.shared} bytes of shared memory")
    if launch.dots and not result.tensor_cores:
        result.faults.append("multiplies without tensor cores")
    return key, asdict(result)


def spills_too_much(one: Compiled) -> bool:
    """Whether the bytes of stack a thread are a fault."""
    if one.kernel == "_extend" and one.constants["PARTIAL"] == "False":
        return one.spilled > SPILLS_OF_PROMPTS
    if one.kernel == "_decode" and one.warps == 1:
        return one.spilled > SPILLS_OF_QUANTIZED_DECODE
    return one.spilled > PUT_ASIDE or one.spills_in_loops > 1


def _spills_in_loops(cubin: bytes) -> int:
    """Instructions that read or write the stack between the target of a branch backwards and the branch."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", _cuobjdump(cubin, "-sass"))
    code = [(int(address, 16), text) for address, text in lines]
    branches = [(address, re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)) for address, text in code]
    loops = [(int(found[1], 16), address) for address, found in branches if found and int(found[1], 16) < address]
    stack = [address for address, text in code if re.search(r"\b(STL|LDL)\b", text)]
    return sum(any(first <= address <= last for first, last in loops) for address in stack)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread."""
    told = _cuobjdump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


def _cuobjdump(cubin: bytes, option: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def _instructions(ptx: str) -> tuple[str, dict[int, int]]:
    """The tensor-core instruction, and the widths of the loads from global memory in bits."""
    names = {"tcgen05": r"tcgen05\.mma", "wgmma": r"wgmma\.mma_async", "mma": r"\bmma\.sync"}
    tensor_cores = next((name for name, pattern in names.items() if re.search(pattern, ptx)), "")
    loads: dict[int, int] = {}
    for found in re.finditer(r"\bld\.global([.\w:]*)\s", ptx):
        vector = re.search(r"\.v(\d)", found[1])
        element = re.search(r"\.[bfus](\d+)", found[1])
        assert element, found[0]
        width = int(vector[1] if vector else 1) * int(element[1])
        loads[width] = loads.get(width, 0) + 1
    for found in re.finditer(r"cp\.async\.c[ag]\.shared\.global[^;]*?\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)", ptx):
        width = 8 * int(found[1], 0)
        loads[width] = loads.get(width, 0) + 1
    return tensor_cores, dict(sorted(loads.items()))


def _resident(result: Compiled) -> int:
    """Blocks that fit on a multiprocessor at once. Registers are given to a warp in units of 256."""
    of_a_warp = -(-max(result.registers, 1) * 32 // 256) * 256
    return min(
        REGISTERS_PER_SM // (of_a_warp * result.warps),
        (shared_bytes(result.target) + 1024) // (result.shared + 1024),  # 1 KiB a block is the driver's
        WARPS_PER_SM[result.target] // result.warps,
        BLOCKS_PER_SM.get(result.target, 32),
    )


def compile_all(
    sample: bool,
    targets: Iterable[int],
    dtypes: tuple[str, ...],
    only: str,
    cases: str,
    jobs: int,
    *,
    quick: bool = False,
) -> list[Compiled]:
    """Record the launches, compile them in `jobs` processes. only, cases: patterns for kernels and cases.

    quick: those that others stand for are returned as they were recorded.
    """
    from bench.gpu_launches import (
        BLOCK_SIZES,
        EDGES,
        KV_DTYPES,
        MODELS,
        RANKS,
        WITH_BLOCK_SIZES,
        Recorder,
        record,
        record_attention,
        record_experts,
        record_int4,
        record_sampling,
    )

    recorder = Recorder()
    for target in targets:
        kv_dtypes = [kv for kv in KV_DTYPES if target >= 89 or kv != "fp8"]
        if sample and target in SMALLER:
            for kv in kv_dtypes:
                record_attention(recorder, target, "Llama-3.1-8B", kv)
            continue
        if sample:
            if target == 90:
                for page in BLOCK_SIZES:
                    record_attention(recorder, target, "Llama-3.1-8B", "auto", page)
            for kv in kv_dtypes:
                record(recorder, target, "Llama-3.1-8B", "bf16", kv, (16,) if kv == "auto" else ())
            if target == 90:
                record(recorder, target, "Llama-3.1-8B", "fp32", "auto", ())
            record_experts(recorder, target, "gpt-oss-20b")
            record_experts(recorder, target, "Qwen3-30B-A3B")
            record_sampling(recorder, target, "Qwen3-0.6B")
            continue
        for name in (*MODELS, *EDGES):
            for dtype in [one for one in dtypes if one != "fp32"] if name in MODELS else ["bf16"]:
                for kv in kv_dtypes:
                    wanted = RANKS if name == "Llama-3.1-8B" else (16,)
                    record(recorder, target, name, dtype, kv, wanted if kv == "auto" else ())
            record_sampling(recorder, target, name)
        for name, kv, page in itertools.product(WITH_BLOCK_SIZES, kv_dtypes, BLOCK_SIZES):
            record_attention(recorder, target, name, kv, page)
        for dtype in (one for one in dtypes if one != "fp32"):
            record_int4(recorder, target, "Llama-3.1-8B", dtype)
        for kv in kv_dtypes if "fp32" in dtypes else ():
            record(recorder, target, "Llama-3.1-8B", "fp32", kv, (16,) if kv == "auto" else ())
    wanted_launches = {
        key: launch
        for key, launch in recorder.launches.items()
        if re.search(only, launch.kernel) and any(re.search(cases, case) for case in launch.cases)
    }
    results = []
    if quick:
        chosen = {launch.key for launch in stand_ins(wanted_launches.values())}
        results = [recorded(launch) for key, launch in wanted_launches.items() if key not in chosen]
        wanted_launches = {key: launch for key, launch in wanted_launches.items() if key in chosen}
    print(f"{len(wanted_launches)} different compilations", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compile, one) for one in wanted_launches.items()]
        for future in as_completed(futures):
            results.append(Compiled(**future.result()[1]))  # type: ignore[arg-type]
            done = sum(one.compiled for one in results)
            print(f"{done}/{len(futures)} {summary(results[-1])}", file=sys.stderr, flush=True)
    return sorted(results, key=lambda one: (one.kernel, one.case, one.target, str(one.constants)))


def summary(one: Compiled) -> str:
    """One line."""
    told = one.error.strip().splitlines()[-1] if one.error else (
        f"{one.registers} registers, {one.spilled} spilled, {one.shared} shared, {one.blocks} blocks/SM, "
        f"{one.tensor_cores or '-'}, loads {one.loads}"
    )  # fmt: skip
    return f"{one.kernel} sm_{one.target} {one.case}: {told} {'; '.join(one.faults)}"


def main() -> int:
    """Compile, judge, print or write."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_compile", description=__doc__)
    parser.add_argument("--sample", action="store_true", help="a few launches that stand for the rest")
    parser.add_argument("--quick", action="store_true", help="of the sample, those that stand for the others")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="compute capabilities, times ten")
    parser.add_argument("--dtypes", default="bf16,fp16,fp32", help="of the activations; fp32 for one model")
    parser.add_argument("--only", default="", help="a pattern for names of kernels")
    parser.add_argument("--cases", default="", help="a pattern for cases, such as 'Llama.*fp8 graph'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="write the tables of docs/gpu-ledger.md there")
    options = parser.parse_args()
    if options.quick and options.ledger:
        parser.error("--quick leaves launches out that the ledger has: write it with --sample")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
    results = compile_all(
        options.sample or options.quick,
        [int(one) for one in options.targets.split(",")],
        tuple(options.dtypes.split(",")),
        options.only,
        options.cases,
        options.jobs,
        quick=options.quick,
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    if options.ledger:
        from bench import gpu_ledger

        page = options.ledger.read_text() if options.ledger.exists() else ""
        of_all = gpu_ledger.summary_of(page) if options.sample else gpu_ledger.summary(results)
        of_sample = gpu_ledger.tables(results) if options.sample else gpu_ledger.tables_of(page)
        options.ledger.write_text(gpu_ledger.ledger(of_all, of_sample))
    faulty = [one for one in results if one.faults]
    for one in faulty:
        print(summary(one))
    print(f"{sum(one.compiled for one in results)} compilations, {len(faulty)} with a fault")
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
