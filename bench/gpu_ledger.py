"""Generates docs/gpu-ledger.md from the results of `bench.gpu_compile`."""

from bench.gpu_compile import Compiled

# What was changed because of these numbers: finding, before, after, why it should be faster. Estimates until timed.
GAINS = (
    ("store into a quantized cache", "did not compile", "compiles, 32 blocks/SM", "fp8 and int8 KV start at all"),
    (
        "`_decode`, 16-bit cache, sm_90",
        "one buffer of keys and values (38 KB), every load waited for",
        "two buffers (71 KB), 3 blocks/SM",
        "loads of the next tile run beside the products: towards 80 % of bandwidth from 50-70 %",
    ),
    (
        "`_decode`, int8 cache, sm_90",
        "221 registers, 2 blocks/SM, one buffer",
        "149 registers, 3 blocks/SM, two buffers",
        "half as many loads again in flight",
    ),
    (
        "`_decode`, grid",
        "1 × 1k: 16 programs; a graph of 256 rows and 32k: 65,536",
        "32; at most 2048 + rows · heads",
        "15-25 % of a step at 256 × 1k, and twice the multiprocessors at batch 1",
    ),
    (
        "`_extend`, sm_90",
        "tiles of 16 tokens × 4 heads, 4 warps",
        "32 tokens × 4 heads, 8 warps, two buffers; the longest tiles first",
        "keys and values are read half as often: 1.3-1.6× in a prompt",
    ),
    (
        "`_extend`, up to 16 new tokens on a long context",
        "8 programs at batch 1: 0.6 ms a layer at 32k",
        "64 programs, and a merge",
        "up to 8× for drafts and short suffixes",
    ),
    (
        "`_extend`, 17 to 250 new tokens on a long context",
        "16 programs for 32 tokens after 32k, 8 KV heads",
        "256 programs, and a merge",
        "some 10× in the attention of a cached prompt's end",
    ),
    (
        "`deterministic`, decode",
        "8 programs at batch 1, kernel by kernel",
        "`_extend_in_order`: 128 programs at 8k, 222 registers (sm_90), no spills; in graphs",
        "as decode without it, but for tiles of 64 rows of which few are used",
    ),
    (
        "`_decode`, 16-bit cache, sm_80",
        "one buffer of 64 keys and values (38 KB), 4 blocks/SM",
        "two buffers of 32 (37 KB), 4 blocks/SM",
        "loads run beside the products, as on sm_90",
    ),
    (
        "cards with 99 KB a block (A10, L4, L40S, RTX 40 and 50)",
        "no tiles: one buffer, drafts up to 56 B spilled",
        "tiles of their own: decode in two buffers, drafts at 166 to 240 registers, no spills",
        "decode towards 80 % of bandwidth",
    ),
    ("`_merge`", "a loop over up to 32 splits", "one load of all", "some µs a layer of latency at long contexts"),
    (
        "`_expand`, rank 64, sm_90",
        "255 registers, 172 B spilled, fp32 FMA, 16-bit loads",
        "116 registers, no spills, mma, 128-bit loads",
        "bound by the bytes of B; rank 256 spilled 13 KB",
    ),
    (
        "`_shrink`, one row, 4096 inputs",
        "12 programs, each of which waits for 16 loads in turn; `_expand` reads partial sums one after the other",
        "24 programs and 4 loads of twice the size; `_expand` has four sums under way",
        "3 µs a layer with adapters: 0.4 ms of a step of an 8B, which takes 6",
    ),
    (
        "scores of an odd vocabulary (Qwen3: 151,669)",
        "32-bit loads",
        "128-bit loads of the columns that the padded head has",
        "a quarter of the loads in each kernel that samples",
    ),
    (
        "threshold of a sample",
        "one block reads the row up to 60 times: about 1 ms",
        "many blocks read it once, one searches 64 candidates a tile in registers",
        "about 30 µs a sample; rows with flat scores take the old way",
    ),
    (
        "`_best_of_tiles`",
        "255 registers, 64 B spilled, 2 blocks/SM",
        "no spills, at least 32 warps/SM",
        "2× of a small part",
    ),
    (
        "float32 on a GPU",
        "7 KB (decode) and 36 KB (extend) spilled a thread, no tensor cores",
        "at most 80 B, three products of tf32",
        "usable; 16-bit types remain several times faster",
    ),
    (
        "penalties, 256 rows × 151,665",
        "697 ms on the host and 296 MB to the device a step; then 141 launches and 18 copies",
        "one token a row to the device, one kernel: 36 launches and 5 copies a step of two layers",
        "host time within a millisecond, 12 bytes a score in place of some 100",
    ),
    (
        "logprobs, biases, min_tokens",
        "4 reads of the device, and copies that the host waits for, row by row",
        "one read a step, with the tokens; one copy for all rows",
        "some 0.1 ms a step, and 10 µs a row that asks",
    ),
    (
        "graphs of decode steps",
        "scores and block tables kept for each of 35 sizes: 2.2 GB of Llama's vocabulary, outside of the budget",
        "hidden states in one buffer, tables in one; reserved before the KV cache is sized",
        "8B with adapters starts on 24 GB",
    ),
    (
        "int8 weights, up to 256 rows",
        "converted to 16 bits in each step: five bytes a weight",
        "converted in registers: one byte a weight, mma, 128-bit loads",
        "decode up to 1.7× of bf16 in place of 0.4×",
    ),
    (
        "four-bit weights (AWQ, GPTQ)",
        "torch's product: all weights again for every 16 rows, 448 GB for a prompt of 2,048 tokens of an 8B",
        "`_times_int4`: codes once up to 256 rows, mma, 128-bit loads; with more, numbers of them once, 31 GB",
        "that prompt 2-3×; decode as before",
    ),
    (
        "mixture of experts, decode",
        "45 launches a layer, 30 of them to choose experts, sort rows and sum outputs",
        "15: one kernel for each of the three",
        "Qwen3-30B-A3B: 1,440 launches fewer a step, 2.6 ms in a graph; its weights take 2.1 ms at one row",
    ),
    (
        "float8 weights",
        "six launches to round the rows of each linear layer",
        "one",
        "600 launches fewer a step of an 8B: 1 ms",
    ),
    (
        "copies to the device, a decode step",
        "5-14, each waits for the stream",
        "inputs, tables, sampling: one pinned copy each, no wait",
        "0.1-0.3 ms a step",
    ),
    ("deterministic products, 8192 tokens", "512 calls a matrix", "64", "about 200,000 launches fewer a prompt"),
)

HEAD = """# What the kernels compile to

Generated on a machine without a GPU, with the assembler that Triton brings along. `make test` compiles the launches
that stand for a sample, and `make kernels` the sample and those of all models; both fail on an error, on spills (but
for 256 bytes in the attention of whole prompts, 192 in that of decode by one warp, and four words elsewhere that are
put aside around a loop), on more shared memory than a block has, and on matrices that are multiplied without tensor
cores.

## What was changed by these numbers, and what it should bring

What is expected was estimated before anything ran on a GPU; [performance.md](performance.md#gpus-one-h100-once) has
the measurements since.

| what | before | after | expected |
|---|---|---|---|
"""

SUMMARY = """
## All models

The worst of all launches of a kernel for a model, written by `python -m bench.gpu_compile --ledger docs/gpu-ledger.md`:
most registers a thread, most bytes spilled (if any), most KB of shared memory, fewest blocks on a multiprocessor at
once. `_decode` and `_extend` were changed since, on an H100; the sample below has them as they are. Each launch in bf16
and fp16 (one model in fp32 too), KV in 16 bits, fp8 and int8, adapters of ranks 8 to 256.
sm_89 stands for 8.6 (A10) too, which has the same tiles, and sm_100 for 10.3 (B300).
"""
TABLES = """
## Launches of the sample

Written by `python -m bench.gpu_compile --sample --ledger docs/gpu-ledger.md`. `make test` compares the launches of all
cells, and the code of those that stand for the others (`bench/gpu_sample.py`: all kinds on sm_90, each kind elsewhere);
`make kernels` compares the page. A cell: registers a thread, bytes spilled (if any), KB of shared memory, blocks on a
multiprocessor at once, and the tensor-core instruction. The case is the first of those that compile to the same code.
Of sm_89 and sm_120 the sample has attention only.
"""


def ledger(of_all: str, of_sample: str) -> str:
    """The page: gains, the summary of all models, and the launches of the sample."""
    return HEAD + "\n".join(f"| {' | '.join(gain)} |" for gain in GAINS) + "\n" + of_all + of_sample


def summary_of(page: str) -> str:
    """The summary that the page has."""
    return SUMMARY + page.partition(SUMMARY)[2].partition(TABLES)[0]


def tables_of(page: str) -> str:
    """The launches of the sample that the page has."""
    return TABLES + page.partition(TABLES)[2]


def summary(results: list[Compiled]) -> str:
    """A row for each kernel and the models that have the same worst cells, with a column for each target."""
    targets = sorted({one.target for one in results})
    lines = [SUMMARY, "| kernel | models | " + " | ".join(f"sm_{target}" for target in targets) + " |"]
    lines.append("|---" * (2 + len(targets)) + "|")
    for kernel in sorted({one.kernel for one in results}):
        own = [one for one in results if one.kernel == kernel]
        rows: dict[tuple[str, ...], list[str]] = {}
        for model in sorted({model for one in own for model in one.models}):
            of_model = [one for one in own if model in one.models]
            cells = tuple(_worst([one for one in of_model if one.target == target]) for target in targets)
            rows.setdefault(cells, []).append(model)
        for cells, models in rows.items():
            names = "all" if len(rows) == 1 else ", ".join(models)
            lines.append(f"| `{kernel}` | {names} | " + " | ".join(cells) + " |")
    launches = sum(one.cases for one in results)
    faulty = sum(bool(one.faults) for one in results)
    lines.append(f"\n{launches} launches are {len(results)} compilations, {faulty} of them with a fault.")
    return "\n".join(lines) + "\n"


def _worst(results: list[Compiled]) -> str:
    if not results:
        return ""
    if any(one.error for one in results):
        return "**does not compile**"
    spilled, shared = max(one.spilled for one in results), max(one.shared for one in results)
    told = [str(max(one.registers for one in results))]
    told += [f"**{spilled} B spilled**"] * (spilled > 0) + [f"{shared / 1024:.0f} KB"] * (shared >= 1024)
    return ", ".join([*told, f"{min(one.blocks for one in results)}/SM"])


def tables(results: list[Compiled]) -> str:
    """A table for each kernel, with a column for each compute capability."""
    targets = sorted({one.target for one in results})
    lines = [TABLES]
    for kernel in sorted({one.kernel for one in results}):
        lines += [f"\n### `{kernel}`\n", "| case | launch | " + " | ".join(f"sm_{target}" for target in targets) + " |"]
        lines.append("|---" * (2 + len(targets)) + "|")
        rows: dict[tuple[str, str], dict[int, str]] = {}
        for one in (one for one in results if one.kernel == kernel):
            rows.setdefault((one.case, _launch(one)), {})[one.target] = cell_of(one)
        for (case, launch), cells in merged(rows).items():
            lines.append(f"| {case} | {launch} | " + " | ".join(cells.get(target, "") for target in targets) + " |")
    return "\n".join(lines) + "\n"


def cells_of(page: str) -> dict[tuple[str, str, str, int], set[str]]:
    """The cells of the sample on a page: (kernel, model, launch, target) -> those of all its cases."""
    found: dict[tuple[str, str, str, int], set[str]] = {}
    for table in tables_of(page).split("\n### `")[1:]:
        kernel, _, body = table.partition("`")
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in body.split("\n") if "|" in line)
        targets = [int(name.removeprefix("sm_")) for name in head[2:]]
        for case, launch, *cells in rows:
            for target, cell in zip(targets, cells, strict=True):
                if cell:
                    found.setdefault((kernel, case.split(" ")[0], launch, target), set()).add(cell)
    return found


def place_of(one: Compiled) -> tuple[str, str, str, int]:
    """Where a launch is on the page: kernel, model, launch and target."""
    return one.kernel, one.case.split(" ")[0], _launch(one), one.target


def merged(rows: dict[tuple[str, str], dict[int, str]]) -> dict[tuple[str, str], dict[int, str]]:
    """The rows without those that equal an earlier row of the same launch."""
    kept: dict[tuple[str, str], dict[int, str]] = {}
    seen: set[tuple[str, str, tuple[tuple[int, str], ...]]] = set()
    for (case, launch), cells in rows.items():
        key = case.split(" ")[0], launch, tuple(sorted(cells.items()))
        if key not in seen:
            seen.add(key)
            kept[case, launch] = cells
    return kept


def _launch(one: Compiled) -> str:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_R", "BLOCK", "V")
    constants = [f"{name} {one.constants[name]}" for name in names if name in one.constants]
    return ", ".join([*constants, f"{one.warps} warps"])


def cell_of(one: Compiled) -> str:
    """What the page says of its code."""
    if one.error:
        return "**does not compile**"
    spilled = f", **{one.spilled} B spilled**" if one.spilled else ""
    shared = f", {one.shared / 1024:.0f} KB" if one.shared >= 1024 else ""
    return f"{one.registers}{spilled}{shared}, {one.blocks}/SM{', ' + one.tensor_cores if one.tensor_cores else ''}"
