"""The page that says what the kernels compile to."""

from bench import gpu_ledger
from bench.gpu_compile import Compiled
from bench.gpu_ledger import tables


def one(target: int, case: str = "Llama bf16 KV auto decode", **more: object) -> Compiled:
    values = {"registers": 96, "shared": 39168, "blocks": 4, "tensor_cores": "mma"} | more
    return Compiled("_decode", target, case, 1, {"BLOCK_N": "64"}, 4, 3, **values)


def test_a_row_for_each_launch_and_a_column_for_each_target():
    page = tables([one(80), one(90, spilled=8), one(80, "Llama fp16 graph"), one(90, "Llama fp16 graph", spilled=8)])
    assert "### `_decode`" in page
    assert "| case | launch | sm_80 | sm_90 |" in page
    cells = "96, 38 KB, 4/SM, mma | 96, **8 B spilled**, 38 KB, 4/SM, mma"
    assert f"| Llama bf16 KV auto decode | BLOCK_N 64, 4 warps | {cells} |" in page
    assert "fp16 graph" not in page, "the same code of the same model is told once"


def test_what_does_not_compile_is_seen():
    assert "**does not compile**" in tables([one(90, error="AssertionError: initial value")])


def test_the_summary_has_the_worst_of_each_model_and_joins_those_that_are_equal():
    summary = gpu_ledger.summary([
        one(80, models=["Llama", "Qwen"]), one(80, "Llama fp16", models=["Llama"], registers=200, blocks=2),
        one(90, models=["Llama", "Qwen", "Phi"]), one(80, models=["Phi"], shared=512, spilled=8),
    ])  # fmt: skip
    assert "| `_decode` | Llama | 200, 38 KB, 2/SM | 96, 38 KB, 4/SM |" in summary
    assert "| `_decode` | Qwen | 96, 38 KB, 4/SM | 96, 38 KB, 4/SM |" in summary
    assert "| `_decode` | Phi | 96, **8 B spilled**, 4/SM | 96, 38 KB, 4/SM |" in summary
    assert "4 launches are 4 compilations, 0 of them with a fault." in summary
    joined = gpu_ledger.summary([one(80, models=["Llama", "Qwen"])])
    assert "| `_decode` | all | 96, 38 KB, 4/SM |" in joined


def test_a_page_keeps_the_part_that_is_not_written_anew():
    of_all, of_sample = gpu_ledger.summary([one(80, models=["Llama"])]), tables([one(90)])
    page = gpu_ledger.ledger(of_all, of_sample)
    assert gpu_ledger.summary_of(page) == of_all
    assert gpu_ledger.tables_of(page) == of_sample
