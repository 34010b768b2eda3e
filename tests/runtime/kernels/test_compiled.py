"""What the kernels compile to for real GPUs, on a machine without one: errors, spills, shared memory, tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_compile import SMALLER, Compiled, spills_too_much
from bench.gpu_ledger import cell_of, cells_of, ledger, place_of, summary_of, tables

ROOT = Path(__file__).parents[3]
LEDGER = ROOT / "docs" / "gpu-ledger.md"
WRITE_IT = "python -m bench.gpu_compile --sample --ledger docs/gpu-ledger.md writes it"
pytestmark = pytest.mark.timeout(7200)  # minutes of one core, which `make test` has only when nobody else wants it


def compiled(path: Path, *options: str) -> list[dict[str, Any]]:
    """In a process of its own: this one interprets kernels, and Triton decides that once."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gpu_compile", "--json", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert path.exists(), done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The launches of the sample; of those that stand for the others, what they compile to."""
    return compiled(tmp_path_factory.mktemp("compiled") / "sample.json", "--quick", "--jobs", "1")


@pytest.fixture(scope="module")
def sample(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were compiled."""
    return [one for one in recorded if one["compiled"]]


def of(results: list[dict[str, Any]], kernel: str, case: str = "") -> list[dict[str, Any]]:
    found = [one for one in results if one["kernel"] == kernel and case in one["case"]]
    assert found, f"no {kernel} of {case} was launched"
    return found


@pytest.mark.capability("KN-1", "KN-8")
def test_every_kernel_compiles_without_spills_and_with_tensor_cores(sample):
    """Findings 1, 11, 14: the quantized store did not compile, `_best_of_tiles` spilled, `_expand` had no mma."""
    assert [(one["kernel"], one["target"], one["case"], one["faults"]) for one in sample if one["faults"]] == []
    assert {one["target"] for one in sample} == {80, 89, 90, 100, 120}
    assert {one["kernel"] for one in sample} >= {
        "_rope_and_store", "_decode", "_merge", "_extend", "_extend_in_order", "_merge_in_order", "_rms_norm",
        "_swiglu", "_shrink", "_expand",
        "_best_of_tiles", "_best_of_rows", "_apply_bitmask", "_penalize_rows", "_choose", "_place", "_grouped", "_sum",
    }  # fmt: skip


@pytest.mark.capability("KN-8")
def test_verified_drafts_and_decode_in_one_order_may_spill_nothing():
    """128 bytes were allowed to every launch of `_extend`, those of verified rows and of deterministic decode too."""

    def too_much(kernel: str, spilled: int, in_loops: int, warps: int = 4, **constants: str) -> bool:
        one = Compiled(kernel, 90, "", 1, constants, warps, 3, spilled=spilled, spills_in_loops=in_loops)
        return spills_too_much(one)

    assert not too_much("_extend", 256, 9, PARTIAL="False")
    assert too_much("_extend", 264, 9, PARTIAL="False")
    assert not too_much("_decode", 192, 9, warps=1), "as timed on an H100"
    assert too_much("_decode", 200, 9, warps=1)
    assert too_much("_extend", 8, 2, PARTIAL="True")
    for kernel in ("_extend_in_order", "_decode", "_expand"):
        assert too_much(kernel, 8, 2)
        assert too_much(kernel, 24, 0)
        assert not too_much(kernel, 8, 1), "a word that its loop reads again"


@pytest.mark.capability("KN-8")
def test_other_block_sizes_compile_to_as_few_registers(sample):
    """A service may ask for blocks of 8 to 128 tokens; only 16 was compiled."""
    for kernel in ("_decode", "_extend", "_extend_in_order", "_rope_and_store"):
        found = of(sample, kernel, "blocks of")
        assert {one["constants"]["BLOCK_SIZE"] for one in found} == {"8", "64"}
        usual = max(one["registers"] for one in of(sample, kernel, "bf16 KV auto") if one["target"] == 90)
        assert all(one["registers"] <= usual + 16 for one in found)


@pytest.mark.capability("KN-8")
def test_the_ledger_has_every_launch_of_the_sample_and_no_other(recorded):
    """Tiles, warps and kernels that are no longer launched so are found without a compilation."""
    on_page = cells_of(LEDGER.read_text())
    assert {place_of(Compiled(**one)) for one in recorded} == set(on_page), WRITE_IT


@pytest.mark.capability("KN-8")
def test_the_ledger_is_what_was_compiled(recorded):
    """Of launches with the same case and tile the page shows the last; each cell of a compiled one is compared."""
    shown = {(place_of(one), one.case): one for one in (Compiled(**values) for values in recorded)}
    compared = [(place, cell_of(one)) for (place, _), one in shown.items() if one.compiled]
    assert {place[0] for place, _ in compared} == {one["kernel"] for one in recorded}
    on_page = cells_of(LEDGER.read_text())
    assert [(place, cell) for place, cell in compared if cell not in on_page[place]] == [], WRITE_IT


@pytest.mark.capability("KV-11")
@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_the_store_into_a_quantized_cache_compiles(sample, kv):
    """Finding 1: a variable changed its type inside a branch, which the interpreter lets pass."""
    assert all(not one["error"] for one in of(sample, "_rope_and_store", f"KV {kv}"))


@pytest.mark.capability("KN-1")
def test_attention_reads_ahead_and_reads_keys_seldom(sample):
    """Findings 7, 8, 10: decode had one buffer of keys and values, extend tiles of 16 tokens on 4 heads."""
    for one in of(sample, "_decode", "bf16 KV auto"):
        keys = int(one["constants"]["BLOCK_N"])
        assert one["shared"] > 2 * 2 * keys * 128 * 2, "two buffers of keys and values of 128 elements"
        assert one["blocks"] >= (2 if one["target"] in SMALLER else 3)
    for one in of(sample, "_extend", "bf16 KV auto prefill"):
        tokens = {90: "64"}.get(one["target"], "32")
        assert one["constants"]["QUERIES"] == tokens, "of a tile: keys are read again for each"
        assert one["warps"] == 8
        assert one["tensor_cores"] == {90: "wgmma", 100: "tcgen05"}.get(one["target"], "mma")


@pytest.mark.capability("KN-1")
@pytest.mark.parametrize("kernel", ["_decode", "_extend", "_extend_in_order"])
def test_float32_is_multiplied_on_tensor_cores_without_spills(sample, kernel):
    """Finding 4: 7 to 36 KB of spills a thread, and no tensor cores."""
    for one in of(sample, kernel, "fp32"):
        assert one["tensor_cores"]
        assert not one["spilled"]


@pytest.mark.capability("KN-1")
def test_a_quantized_cache_leaves_room_for_three_decode_programs(sample):
    """Finding 10: 221 registers let two run on a multiprocessor, and memory waits for them."""
    for one in of(sample, "_decode", "KV int8") + of(sample, "_decode", "KV fp8"):
        assert one["target"] != 90 or one["blocks"] >= 3
        keys = int(one["constants"]["BLOCK_N"])
        assert one["shared"] > 2 * 2 * keys * 128, "two buffers of keys and values of 128 codes"


@pytest.mark.capability("KN-1")
@pytest.mark.parametrize("kernel", ["_decode", "_extend", "_expand", "_shrink"])
def test_queries_and_matrices_are_read_with_the_widest_loads(sample, kernel):
    """Findings 11, 13: strides without a known alignment forced loads of 16 bits."""
    for one in of(sample, kernel, "bf16"):
        assert "16" not in one["loads"]
        assert one["loads"].get("128", 0) > 0


@pytest.mark.capability("KN-1")
@pytest.mark.parametrize("kernel", ["_merge", "_merge_chunks"])
def test_all_splits_of_a_head_are_loaded_at_once(sample, kernel):
    """Finding 15: a loop over up to 32 splits waited for memory as often."""
    for one in of(sample, kernel):
        at_once = one["loads"]["128"] * 16 * 32 * one["warps"]  # bytes of all threads
        assert at_once == 4 * int(one["constants"]["BLOCK_S"]) * int(one["constants"]["BLOCK_D"])


@pytest.mark.capability("KN-6")
@pytest.mark.parametrize("kernel", ["_find_candidates", "_threshold_of_rows", "_best_of_tiles"])
def test_scores_of_an_odd_vocabulary_are_read_with_the_widest_loads(sample, kernel):
    """Finding 13: 151,669 tokens were read 32 bits at a time, because a mask ended within a load."""
    for one in of(sample, kernel, "Qwen3-0.6B"):
        assert int(one["constants"]["V"]) % 16
        assert one["loads"].get("128", 0) > 0
        assert one["loads"].get("32", 0) < 8, "what belongs to the row: temperature, threshold and the like"


@pytest.mark.capability("KN-8", "QZ-1", "QZ-4")
@pytest.mark.parametrize("form", ["float8 qkv", "float8 blocks qkv"])
def test_float8_weights_are_multiplied_on_tensor_cores_of_gpus_without_float8(sample, form):
    found = [one for one in of(sample, "_times_codes", form) if one["target"] == 80]
    assert len(found) == 3, "for few, some and many rows"
    assert all(one["tensor_cores"] == "mma" and not one["spilled"] for one in found)


@pytest.mark.capability("KN-8", "QZ-4")
@pytest.mark.parametrize("tokens", [1, 32, 256])
def test_four_bit_weights_are_multiplied_on_tensor_cores_and_read_side_by_side(sample, tokens):
    """torch's int4 product reads all weights again for every 16 rows, so prompts were slower than in bfloat16."""
    found = of(sample, "_times_int4", f"qkv {tokens} groups of 128")
    assert {one["target"] for one in found} == {80, 90, 100}
    for one in found:
        assert one["tensor_cores"]
        assert not one["spilled"]
        assert one["loads"].get("128", 0) > 0


@pytest.mark.capability("KN-8")
@pytest.mark.kernels
def test_the_whole_sample_is_what_the_ledger_has(tmp_path):
    """`make test` compiles the launches that stand for the others (`bench.gpu_sample`)."""
    whole = [Compiled(**one) for one in compiled(tmp_path / "sample.json", "--sample")]
    assert [(one.kernel, one.target, one.case, one.faults) for one in whole if one.faults] == []
    page = LEDGER.read_text()
    assert page == ledger(summary_of(page), tables(whole)), WRITE_IT


@pytest.mark.capability("KN-8")
@pytest.mark.kernels
def test_every_launch_of_every_model_compiles_without_a_fault(tmp_path):
    results = compiled(tmp_path / "all.json")
    assert [(one["kernel"], one["target"], one["case"], one["faults"]) for one in results if one["faults"]] == []
