"""Whole worker steps on a GPU that is not there: one device, no hidden waits, and few launches and copies."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench.fake_gpu import DEVICE, fake_gpu
from bench.gpu_models import CONFIGS
from bench.gpu_steps import (
    BLOCK,
    DECODE,
    EVERYTHING,
    GREEDY,
    PENALIZED,
    STEPS,
    FakeMachine,
    a_machine,
    with_layers,
)
from bench.gpu_steps import run_step as run_step_anew
from slipway_runtime.kernels.attention_plan import MAX_SPLITS, SPLIT
from slipway_runtime.kernels.upload import download, upload
from slipway_runtime.layers.matmul_quantized import GroupedFp8
from slipway_runtime.models.config import parse_config
from slipway_runtime.worker.graphs import (
    LAUNCHES_IN_ONE_ORDER,
    LAUNCHES_OF_A_LAYER,
    LAUNCHES_OF_ADAPTERS,
    LAUNCHES_OF_CHUNKS,
    reserve_bytes,
)

run_step = functools.cache(run_step_anew)  # a record is read only
PUBLISHED = Path(__file__).parents[1] / "models" / "published"
ROWS, COMPUTED = len(DECODE[0]), DECODE[1][0]
# What the host sends for a row of a decode step: its block table, and some numbers for inputs, filters and penalties.
BYTES_OF_A_ROW = 4 * (COMPUTED // BLOCK + 1) + 240


@pytest.mark.capability("KN-8")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_its_device_and_waits_once(name, record_property):
    """Finding A2, C15: layers on another rank's device; 5 to 14 copies of pageable memory in a step of decode."""
    record = run_step(name)
    record_property("asked", record.summary())
    print(f"{name}: {record.summary()}")
    assert record.faults == []
    samples = not name.startswith("rank 1")
    offloaded = 2 if name.startswith("blocks to host memory") else 0  # which nobody waits for
    # Scores of prompts come in parts, so that they need little memory beside the model.
    assert record.waits == record.count("download") - offloaded
    assert record.waits <= samples or name == "prompt logprobs"


# Experts, their routers and sinks; norms of outputs and caps; merged projections; layers in float8 blocks. Kernels of a
# captured layer.
OTHER_MODELS = {
    "mixtral-8x7b-instruct-v0.1": 15,
    "qwen3-30b-a3b": 15,
    "gpt-oss-20b": 18,
    "gemma-2-2b": 12,
    "phi-4-mini-instruct": 10,
    "qwen3-8b-fp8": 10,
}


@pytest.mark.capability("KN-8", "API-20", "API-21")
@pytest.mark.parametrize(("model", "kernels"), OTHER_MODELS.items(), ids=OTHER_MODELS)
def test_steps_of_other_families_stay_on_their_device_and_decode_is_one_graph(model, kernels):
    config = json.loads((PUBLISHED / f"{model}.json").read_text())
    for name in ("mixed", "decode 256 recorded", "mixed, small, recorded", "rank 1 of 2"):
        record = run_step_anew(name, config)
        print(f"{model}, {name}: {record.summary()}")
        assert record.faults == []
        assert record.waits == record.count("download") == (name != "rank 1 of 2")
        assert record.count("graph") == name.endswith("recorded")
    two, four = (run_step_anew("decode 256 recorded", config, layers=layers) for layers in (2, 4))
    assert len(four.inside) - len(two.inside) <= 2 * kernels


@pytest.mark.capability("KN-8")
@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("decode")])
def test_a_step_of_decode_sends_some_numbers_a_row_and_no_table(name):
    """Finding C12: penalties sent 296 MB for 256 rows; biases and ends were copied row by row."""
    record = run_step(name)
    sent = sum(one.nbytes for one in record.operations if one.kind == "upload")
    assert record.count("download") == 1
    assert record.count("upload") <= 8
    assert record.count("kernel") <= 53
    assert sent <= ROWS * BYTES_OF_A_ROW


# Launches of the host for two layers; those beyond a graph score and sample. The largest logits, which show whether a
# row is finite, cost one more: they travel with the tokens.
BOUNDS = {
    "prefill": 31,
    "mixed": 36,
    "verify": 37,
    "decode 256": 32,
    "deterministic": 92,
    "deterministic, 256 rows": 56,
    "deterministic, 256 rows, recorded": 10,
    "verify, 256 rows": 36,
    "rank 0 of 2": 50,
    "rank 0 of 2, recorded": 14,
    "decode 256 recorded, AWQ weights": 7,
    "decode 256 recorded, GPTQ weights": 7,
    "decode 256 recorded": 12,
    "decode 256 recorded, int8 weights": 7,
    "decode 256 recorded, fp8 weights": 7,
    "decode 256 recorded, int8 KV": 7,
    "decode 256 recorded, fp8 KV": 7,
}


@pytest.mark.capability("KN-8")
@pytest.mark.parametrize("name", BOUNDS)
def test_launches_of_the_host_are_bounded_for_every_kind_of_step(name):
    record = run_step(name)
    assert record.count("kernel") <= BOUNDS[name]
    assert record.count("graph") == ("recorded" in name)
    assert record.count("upload") <= 3
    if "recorded" in name:  # no block table among what is sent
        assert sum(one.nbytes for one in record.operations if one.kind == "upload") <= ROWS * 100


@pytest.mark.capability("BS-7", "KN-8")
@pytest.mark.parametrize("params", [GREEDY, PENALIZED, EVERYTHING], ids=["greedy", "penalties", "everything"])
def test_sampled_tokens_stay_on_the_device_for_the_next_step(params):
    """Finding C15: the host waited for the tokens of a step before it could pack the next one."""
    with a_machine(graphs=True) as machine:
        machine.step(*DECODE, params)
        *launched, one, two, three = machine.ahead(3)
    assert [(record.waits, record.count("download"), record.count("graph")) for record in launched] == [(0, 1, 1)] * 3
    assert [(record.waits, len(record.operations)) for record in (one, two, three)] == [(1, 0)] * 3
    assert [record.faults for record in launched] == [[]] * 3
    if params is GREEDY:  # rows, positions, slots and lengths: one copy, 28 bytes a row
        assert [[one.nbytes for one in record.operations if one.kind == "upload"] for record in launched] == [
            [28 * ROWS]
        ] * 3
    print(launched[0].summary())


@pytest.mark.capability("KN-5", "KN-8")
def test_a_recorded_step_is_one_graph_and_what_samples():
    record = run_step("decode 256 recorded")
    assert record.count("graph") == 1
    print(record.summary())
    assert record.names()["_decode"] == 2, "both layers are within the graph"
    assert record.count("kernel") <= 12
    sent = sum(one.nbytes for one in record.operations if one.kind == "upload")
    assert sent <= ROWS * 100, "no block tables, no tokens: rows, positions, slots, lengths, and what sampling takes"


@pytest.mark.capability("KN-5", "KN-8")
def test_graphs_end_before_the_scores_and_share_their_buffers():
    """Finding A4: float32 scores kept for 35 batch sizes were 2 GB of Llama's vocabulary, outside of the budget."""
    scores = 4 * ROWS * 151_936
    largest = max(one.flops for one in run_step("decode 256 recorded").inside)
    assert 0 < largest < 2 * ROWS * 1024 * 151_936, "the head is not among the products"
    with a_machine(graphs=True) as machine:
        graphs = machine.runner.graphs
        assert graphs is not None
        decodes, chunks, shared = graphs._decodes, graphs._chunks, graphs._decodes._shared
        of_chunks = list(chunks._static.values())
        assert (
            len({plan.tables.untyped_storage()._cdata for plan in (shared.plan, *(one.plan for one in of_chunks))}) == 1
        )
        buffers = [decodes._static, shared.tables, shared.hidden, shared.plan.lengths, shared.plan.tables,
                   *(one.buffer for one in of_chunks)]  # fmt: skip
        reserved = reserve_bytes(
            machine.config.shape, max_num_seqs=ROWS, max_model_len=machine.longest, block_size=BLOCK, dtype="bf16",
            with_adapters=False,
        )  # fmt: skip
        assert sum(buffer.nbytes for buffer in buffers) < reserved < scores * 2


@pytest.mark.capability("KN-5", "KV-5")
@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("decode 256 recorded", LAUNCHES_OF_A_LAYER),
        ("decode 256 recorded, adapters", LAUNCHES_OF_A_LAYER + LAUNCHES_OF_ADAPTERS),
        ("deterministic, 256 rows, recorded", LAUNCHES_OF_A_LAYER + LAUNCHES_IN_ONE_ORDER),
        ("verify recorded", LAUNCHES_OF_A_LAYER + LAUNCHES_OF_CHUNKS),
        (
            "deterministic, verify recorded, adapters",
            LAUNCHES_OF_A_LAYER + LAUNCHES_OF_CHUNKS + LAUNCHES_IN_ONE_ORDER + LAUNCHES_OF_ADAPTERS,
        ),
    ],
)
def test_the_launches_of_a_captured_layer_are_no_more_than_memory_is_reserved_for(name, reserved):
    """Those of adapters were not counted."""
    two, four = (run_step(name, layers=layers) for layers in (2, 4))
    assert (len(four.inside) - len(two.inside)) / 2 <= reserved


@pytest.mark.capability("KN-5", "KV-5")
def test_partial_results_of_split_attention_are_reserved():
    """They were not: 136 MB for 256 rows of an 8B model, taken from the driver after the KV cache had its share."""
    config = parse_config(CONFIGS["Llama-3.1-8B"])
    longer, shorter = (
        reserve_bytes(config.shape, max_num_seqs=256, max_model_len=longest, block_size=BLOCK, dtype="bf16",
                      with_adapters=False)
        for longest in (8192, SPLIT)
    )  # fmt: skip
    partial_results = ROWS * MAX_SPLITS * 32 * (128 + 2) * 4
    tables = (257 + 256 + 128 + 1) * 4 * 8192 // BLOCK
    assert partial_results * 0.9 < longer - shorter - tables < partial_results


@pytest.mark.capability("DD-3", "KN-8")
@pytest.mark.parametrize(("name", "gathered"), [("rank 1 of 2", 1), ("rank 1 of 2, prompt logprobs", 1 + 13 + 6)])
def test_a_rank_beyond_the_first_reads_nothing_and_sums_twice_a_layer(name, gathered):
    """And once for the embedding. Logits are gathered for the samples, and for each 55 tokens of scored prompts."""
    record = run_step(name)
    assert record.waits == 0
    assert record.names()["all_reduce"] == 1 + 2 * 2
    assert record.names()["all_gather"] == gathered


@pytest.mark.capability("DD-3", "KN-5", "KN-8")
def test_decode_steps_of_several_ranks_are_one_graph_with_its_sums():
    """Finding C17: steps under tensor parallelism were eager."""
    record = run_step("rank 1 of 2, recorded")
    assert (record.count("graph"), record.count("download"), record.waits) == (1, 0, 0)
    assert [one.name for one in record.inside].count("all_reduce") == 1 + 2 * 2
    assert record.names()["all_gather"] == 1
    assert record.count("kernel") <= 6, "tokens that rank 0 sampled come from the host; then logits, put side by side"
    with_adapter = run_step("rank 1 of 2, adapters, recorded")
    assert (with_adapter.count("graph"), with_adapter.count("download"), with_adapter.waits) == (1, 0, 0)
    assert [one.name for one in with_adapter.inside].count("_expand") == 2 * 4


@pytest.mark.capability("KN-5", "KN-8", "SD-1")
@pytest.mark.parametrize(
    ("name", "recorded", "launches"),
    [
        ("verify", "verify recorded", 6),
        ("mixed, small", "mixed, small, recorded", 8),
        ("rank 1 of 2, mixed", "rank 1 of 2, mixed, recorded", 6),
    ],
)
def test_a_small_step_with_chunks_is_one_graph_one_copy_and_what_samples(name, recorded, launches):
    """Finding C17: only decode was recorded; drafts and chunks were some nine launches a layer, and three copies."""
    eager, replayed = run_step(name), run_step(recorded)
    of_layers = [run_step(name, layers=layers).count("kernel") for layers in (2, 4)]
    assert (of_layers[1] - of_layers[0]) / 2 >= 9, "launches of a layer, by the host"
    assert (replayed.count("graph"), replayed.count("upload")) == (1, 1)
    assert eager.count("upload") == 3
    assert replayed.count("kernel") <= launches
    assert replayed.count("download") == eager.count("download")
    assert replayed.waits == eager.waits
    assert run_step(recorded, layers=4).count("kernel") == replayed.count("kernel")
    for kernel in ("_decode", "_extend", "_merge_chunks"):
        assert replayed.names()[kernel] == 2, "one a layer, within the graph"


@pytest.mark.capability("KN-5", "KN-8")
def test_an_adapter_adds_one_copy_to_a_recorded_step_with_chunks():
    for name in ("verify recorded, adapters", "mixed, small, recorded, adapters"):
        record = run_step(name)
        assert (record.count("graph"), record.count("upload")) == (1, 2)
        assert [one.name for one in record.inside].count("_expand") == 2 * 4


@pytest.mark.capability("BS-7", "KN-5", "KN-8")
def test_recorded_chunks_are_launched_before_the_tokens_beside_them_are_read():
    with a_machine(graphs=True) as machine:
        machine.step([1] * 32 + [50], [1000] * 32 + [0])
        *launched, one, two = machine.ahead(2, chunk=50)
    assert [(record.waits, record.count("graph"), record.count("upload")) for record in launched] == [(0, 1, 1)] * 2
    assert [(record.waits, len(record.operations)) for record in (one, two)] == [(1, 0)] * 2
    assert [record.faults for record in launched] == [[]] * 2


@pytest.mark.capability("KN-5", "KN-8")
def test_the_host_sends_a_recorded_step_twelve_bytes_for_each_block_that_a_table_grows_by():
    record = run_step("decode 256 recorded, tables grow")
    assert (record.count("graph"), record.count("upload")) == (1, 2)
    assert sorted(one.nbytes for one in record.operations if one.kind == "upload") == [12 * ROWS, 28 * ROWS]
    assert record.count("kernel") <= 8


@pytest.mark.capability("KN-8")
@pytest.mark.parametrize("name", ["adapters, one is loaded", "adapters, one is replaced"])
def test_an_adapter_goes_into_its_slot_by_pinned_copies_alone(name):
    record = run_step(name)
    matrices = 2 * 7 * 2  # layers, modules, A and B
    loads = 1 if name.endswith("loaded") else 2
    assert record.count("upload") <= loads * matrices + 4
    assert record.waits == 1


@pytest.mark.capability("KN-8", "KV-12")
def test_a_block_moves_between_device_and_host_in_one_copy():
    plain, moved = run_step("decode 256"), run_step("blocks to host memory and back")
    assert moved.count("upload") == plain.count("upload") + 1
    assert moved.count("download") == plain.count("download") + 2
    assert moved.waits == plain.waits


@pytest.mark.capability("DD-3", "KN-8")
def test_a_gather_is_one_kernel_and_the_copies_that_put_its_parts_side_by_side():
    record = run_step("rank 0 of 2, recorded")
    names = record.names()
    assert names["all_gather"] == 1
    assert names["clone"] <= 2, "the parts of (ranks, rows, columns) become columns of rows"
    assert record.waits == record.count("download") == 1


def test_a_thread_that_did_not_choose_the_device_launches_no_kernel():
    """Triton launches on the current device, which belongs to a thread."""
    with fake_gpu() as gpu, ThreadPoolExecutor(1) as other:
        x = torch.zeros(4, device=DEVICE)
        gpu.launch("here", [x])
        with pytest.raises(RuntimeError, match="there is launched on cuda:1 by a thread whose current device is 0"):
            other.submit(gpu.launch, "there", [x]).result()


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda x: x + torch.zeros(4, device="cuda"), "same device"),
        (lambda x: x + torch.zeros(4), "same device"),
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[x > 0], "nonzero"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
    ],
)
def test_what_cannot_be_on_a_gpu_raises(mistake, sentence):
    with fake_gpu() as gpu, gpu.step(), pytest.raises(Exception, match=sentence):
        mistake(torch.zeros(4, device=DEVICE))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda x: x.copy_(torch.zeros(4)), "pageable"),
        (lambda x: x.copy_(torch.zeros(4), non_blocking=True), "pageable"),
        (lambda x: torch.zeros(4, pin_memory=True).to(DEVICE), "pageable"),
        (lambda x: x.cpu(), "outside of download"),
        (lambda x: x[torch.tensor([1, 2])], "of the host"),
    ],
)
def test_what_makes_the_host_wait_unseen_is_a_fault(mistake, sentence):
    with fake_gpu() as gpu, gpu.step() as record:
        mistake(torch.zeros(4, device=DEVICE))
    assert any(sentence in fault for fault in record.faults)


def test_one_copy_each_way_is_no_fault():
    import numpy as np

    with fake_gpu() as gpu, gpu.step() as record:
        one, two = upload((np.arange(5), np.ones(3, dtype=np.float32)), DEVICE)
        arrays = download((one, two))
    assert record.faults == []
    assert (record.count("upload"), record.count("download"), record.waits) == (1, 1, 1)
    assert [(array.dtype, array.shape) for array in arrays] == [(np.dtype("int64"), (5,)), (np.dtype("float32"), (3,))]


def test_a_copy_from_the_host_has_no_place_in_a_graph():
    with fake_gpu() as gpu:
        graph = gpu.capture(lambda: torch.zeros(4, device=DEVICE).copy_(torch.zeros(4)))
        with gpu.step() as record:
            graph.replay()
    assert "upload while a graph is captured" in record.faults


def test_rows_of_one_step_may_ask_for_everything():
    """The fullest step there is: all kinds of sampling for drafts."""
    with a_machine() as machine:
        record = machine.step([5, 3, 1, 1], [40, 1023, 99, 7], EVERYTHING, drafts=((7,) * 4, (7,) * 2, (), ()))
    assert record.faults == []


@pytest.mark.capability("KN-8", "DD-3", "QZ-4")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_ranks_on_gpus_hold_their_part_of_a_checkpoint_in_float8_as_codes(capability):
    """o and down became numbers of 16 bits, twice the memory that each GPU was planned for."""
    config = with_layers(parse_config(json.loads((PUBLISHED / "qwen3-8b-fp8.json").read_text())), 1)
    with fake_gpu(capability) as gpu:
        (layer,), (part,) = (FakeMachine(gpu, config, ranks=ranks).runner.decoder.layers for ranks in (1, 2))
    for whole, own in zip(layer.linears, part.linears, strict=True):
        assert isinstance(own.matmul, GroupedFp8)
        assert 2 * own.nbytes == whole.nbytes


@pytest.mark.capability("KN-8", "KV-2")
@pytest.mark.parametrize("layers", [2, 6])
def test_copies_for_many_answers_are_two_launches_and_one_upload(layers):
    """128 answers of a model of 32 layers were some 4,000 launches."""
    copies = tuple((3, target) for target in range(1000, 1127))
    counts = []
    for given in ((), copies):
        with a_machine(layers=layers) as machine:
            record = machine.step([1] * 2, [100] * 2, copies=given)
        counts.append((record.count("kernel"), record.count("upload")))
        assert not record.faults
    (kernels, uploads), copying = counts
    assert copying == (kernels + 2, uploads + 1)
