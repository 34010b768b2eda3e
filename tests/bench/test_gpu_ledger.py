"""The page that says what the kernels compile to."""

from bench.gpu_compile import Compiled
from bench.gpu_ledger import ledger


def one(target: int, case: str = "Llama bf16 KV auto decode", **more: object) -> Compiled:
    values = {"registers": 96, "shared": 39168, "blocks": 4, "tensor_cores": "mma"} | more
    return Compiled("_decode", target, case, 1, {"BLOCK_N": "64"}, 4, 3, **values)


def test_a_row_for_each_launch_and_a_column_for_each_target():
    page = ledger([one(80), one(90, spilled=8), one(80, "Llama fp16 graph"), one(90, "Llama fp16 graph", spilled=8)])
    assert "### `_decode`" in page
    assert "| case | launch | sm_80 | sm_90 |" in page
    cells = "96, 38 KB, 4/SM, mma | 96, **8 B spilled**, 38 KB, 4/SM, mma"
    assert f"| Llama bf16 KV auto decode | BLOCK_N 64, 4 warps | {cells} |" in page
    assert "fp16 graph" not in page, "the same code of the same model is told once"


def test_what_does_not_compile_is_seen():
    assert "**does not compile**" in ledger([one(90, error="AssertionError: initial value")])
