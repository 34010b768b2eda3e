"""The roofline on paper: bytes, operations and launches are those of the runtime's own code."""

import pytest

from bench import gpu, gpu_plan
from bench.fake_gpu import Operation
from bench.gpu_plan import CARDS, decode, prefill, seconds

QWEN, LAYERS = "Qwen3-0.6B", 2


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch):
    monkeypatch.setattr(gpu_plan, "_layers", lambda model: LAYERS)


@pytest.mark.parametrize(("rows", "context"), [(1, 1024), (32, 1024), (32, 8192)])
def test_a_step_of_decode_moves_weights_and_keys_once_and_little_beside(rows, context):
    planned = decode(QWEN, CARDS["H100"], rows, context)
    attention, mlp = 1024 * (2 * 16 + 2 * 8) * 128, 3 * 1024 * 3072
    weights = 2 * (LAYERS * (attention + mlp) + 1024 * 151_936)
    keys = 2 * 2 * LAYERS * 8 * 128 * rows * context
    scores = 4 * 151_936 * rows  # which sampling reads and writes some times
    assert weights + keys < planned.nbytes < 1.1 * (weights + keys) + 8 * scores
    assert 0.3 < planned.share < 1.0
    assert planned.launches < 13 < planned.kernels
    assert planned.copies == 3, "inputs, filters, samples"


def test_operations_of_a_prompt_are_those_of_its_products_and_half_of_its_attention():
    planned = prefill(QWEN, CARDS["H100"], 2048)
    products = LAYERS * (1024 * (2 * 16 + 2 * 8) * 128 + 3 * 1024 * 3072)
    attention = LAYERS * 16 * 128 * 2 * 2048**2
    assert planned.flops == pytest.approx(2 * 2048 * products + attention + 2 * 1024 * 151_936, rel=0.01)


def test_few_programs_do_not_draw_the_whole_bandwidth():
    few, many = (Operation("kernel", "_decode", nbytes=10**9, programs=count) for count in (8, 512))
    assert seconds(few, CARDS["H100"], 0.0) > 5 * seconds(many, CARDS["H100"], 0.0)


def test_a_card_with_more_bandwidth_is_faster_and_what_does_not_fit_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(gpu_plan, "CONTEXTS", (1024, 32_768))
    monkeypatch.setattr(gpu_plan, "BATCHES", (1, 256))
    monkeypatch.setattr("sys.argv", ["bench.gpu", "--plan", QWEN, "H100"])
    assert gpu.main() == 0
    told = capsys.readouterr().out
    assert "decode 256 × 1024" in told
    assert "decode 256 × 32768" not in told, "940 GB of keys and values"
    assert decode(QWEN, CARDS["B200"], 1, 1024).seconds < decode(QWEN, CARDS["H100"], 1, 1024).seconds
