"""The roofline on paper: bytes, operations and launches are those of the runtime's own code."""

import weakref

import pytest
import torch

from bench import gpu, gpu_plan
from bench.fake_gpu import Operation
from bench.gpu_plan import CARDS, Forms, decode, prefill, seconds

QWEN, LAYERS = "Qwen3-0.6B", 2


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch):
    for module in (gpu_plan, gpu):
        monkeypatch.setattr(module, "layers_of", lambda model: LAYERS)


@pytest.mark.parametrize(("rows", "context"), [(1, 1024), (32, 1024), (32, 8192)])
def test_a_step_of_decode_moves_weights_and_keys_once_and_little_beside(rows, context):
    planned = decode(QWEN, CARDS["H100"], rows, context)
    attention, mlp = 1024 * (2 * 16 + 2 * 8) * 128, 3 * 1024 * 3072
    weights = 2 * (LAYERS * (attention + mlp) + 1024 * 151_936)
    keys = 2 * 2 * LAYERS * 8 * 128 * rows * context
    scores = 4 * 151_936 * rows  # which sampling reads and writes some times
    assert weights + keys < planned.nbytes < 1.1 * (weights + keys) + 8 * scores
    assert 0.3 < planned.share < 1.0
    assert planned.launches <= 13 < planned.kernels
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


def test_the_table_says_what_bounds_each_step(capsys, monkeypatch):
    monkeypatch.setattr(gpu_plan, "CONTEXTS", (8192,))
    monkeypatch.setattr(gpu_plan, "BATCHES", (1, 32))
    monkeypatch.setattr(gpu_plan, "PROMPTS", (2048,))
    print(gpu_plan.table(QWEN, "H100"))
    heading, _, *rows = capsys.readouterr().out.strip().splitlines()[2:]
    assert heading.endswith("| bound by |")
    bounds = [row.rsplit("|", 2)[1].strip().partition(",")[0] for row in rows]
    assert bounds == ["weights", "keys and values", "launches and copies"]


@pytest.mark.parametrize("model", [name for name in gpu_plan.PUBLISHED if name not in gpu_plan.CONFIGS])
def test_published_models_are_planned_and_read_what_they_hold(model):
    one, many = (decode(model, CARDS["H200"], rows, 1024) for rows in (1, 256))
    assert 0.1 < one.share < 0.9
    assert one.nbytes < many.nbytes
    if model in gpu_plan.RANKS:
        assert "collectives" in gpu_plan._limit(Operation("kernel", "all_reduce"), CARDS["H200"])
        assert one.kernels > decode("Llama-3.1-8B", CARDS["H200"], 1, 1024).kernels, "and two sums a layer"


def test_a_rank_of_four_reads_a_quarter_of_the_layers(monkeypatch):
    of_four = decode("Llama-3.1-70B", CARDS["H100"], 32, 8192)
    monkeypatch.setattr(gpu_plan, "RANKS", {})
    whole = decode("Llama-3.1-70B", CARDS["H100"], 32, 8192)
    assert of_four.roofline_seconds == pytest.approx(whole.roofline_seconds / 4, rel=0.02)
    assert of_four.seconds > whole.seconds / 4, "sums between the ranks, and as many launches"


def test_few_rows_read_a_part_of_the_experts():
    few, many = (decode("Qwen3-30B-A3B", CARDS["H200"], rows, 16) for rows in (1, 256))
    of_an_expert = 3 * 2048 * 768 * 2
    assert 7.5 * of_an_expert * LAYERS < few.nbytes - 2 * 2048 * 151_936 < 9 * of_an_expert * LAYERS + 10**8
    assert many.nbytes > few.nbytes + 100 * of_an_expert * LAYERS


def test_codes_of_one_byte_halve_what_a_step_must_read():
    plain, codes = (decode(QWEN, CARDS["H100"], 32, 8192, forms) for forms in (Forms(), Forms("int8", "int8")))
    assert codes.nbytes < 0.65 * plain.nbytes
    assert codes.roofline_seconds < 0.65 * plain.roofline_seconds
    assert codes.flops == pytest.approx(plain.flops, rel=0.01), "the same products, whatever kernel makes them"


def test_the_roofline_counts_no_activations():
    """A step of one row and one of 256 read the same weights; the second one also writes 256 rows of hidden states."""
    one, many = (decode(QWEN, CARDS["H100"], rows, 16) for rows in (1, 256))
    keys = 2 * 2 * LAYERS * 8 * 128 * 16
    assert (many.roofline_seconds - one.roofline_seconds) * CARDS["H100"].bandwidth == pytest.approx(255 * keys)


@pytest.fixture
def small(monkeypatch):
    config = gpu_plan.PUBLISHED[QWEN] | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    monkeypatch.setitem(gpu_plan.PUBLISHED, QWEN, config)


def test_the_memory_of_a_timed_machine_is_free_before_the_next_one_is_made(small, monkeypatch):
    """Runner and graphs refer to each other: two machines of an 8B model with 256 rows are more than 80 GB."""
    made = []

    class Watched(gpu.Machine):
        def __init__(self, *args, **settings):
            assert not [memory for one in made for memory in one if memory() is not None], "the one before has memory"
            super().__init__(*args, **settings)
            self.runner.graphs = Graphs(self.runner)
            made.append([weakref.ref(one) for one in (self.runner.decoder, self.caches[0].untyped_storage())])

    class Graphs:
        def __init__(self, runner):
            self._runner = runner

        def replay(self, *_):
            return None

        def update_tables(self, entries):
            """Nothing is captured."""

    monkeypatch.setattr(gpu, "Machine", Watched)
    steps, card = [(1, 64), (4, 64)], CARDS["H100"]
    assert len(list(gpu.whole_steps(QWEN, torch.device("cpu"), card, steps, [32], dtype=torch.float32))) == 3
    assert len(made) == 3


def test_measured_steps_stand_beside_the_plan(small):
    """The code that times steps on a GPU, here on the CPU with a small model: every case has both numbers."""
    found = list(
        gpu.whole_steps(QWEN, torch.device("cpu"), CARDS["H100"], [(1, 64), (4, 64)], [32], dtype=torch.float32)
    )
    assert [one.name.partition(", ")[2] for one in found] == [
        "weights bf16, KV bf16, decode 1 × 64: measured ÷ planned",
        "weights bf16, KV bf16, decode 4 × 64: measured ÷ planned",
        "weights bf16, KV bf16, prefill 32: measured ÷ planned",
    ]
    assert all(one.value > 0 and "measured" in one.note and "planned" in one.note for one in found)
