"""Recorded steps: what is recorded, what is put into a recording, and when a step is computed as planned.

Without a GPU a recording computes again, into the scores that it had: what differs from a CUDA graph is that launches
could change, so that is watched.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from slipway_runtime.engine import sleep
from slipway_runtime.engine.warmup import try_capture
from slipway_runtime.kernels import (
    gpu,
    lora,
    norms,
    paged_attention,
    reference,
    reference_lora,
    sampling,
    store_kv,
)
from slipway_runtime.kernels.dispatch import Kernels, capturable
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import AdapterLoad, NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.models.adapter_weights import HostAdapter
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import DoesNotFitError, read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.worker import capture
from slipway_runtime.worker.adapter_slots import AdapterSlots
from slipway_runtime.worker.capture import Capture, CapturedGraph, CudaCapture, StepHidden
from slipway_runtime.worker.graphs import StepGraphs, batch_sizes
from slipway_runtime.worker.inputs import HostInputs
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.runner import Runner
from tests.runtime.checkpoints import a_checkpoint

BLOCK, CPU = 4, torch.device("cpu")
PARAMS = SamplingParams(max_tokens=9, temperature=0.0)


def eager_capture(compute: Callable[[], object]) -> CapturedGraph:
    return CapturedGraph(compute)


def a_runner(path: Path, kernels: Kernels, device: torch.device = CPU, record: Capture | None = None) -> Runner:
    config = read_config(path)
    with Checkpoint(path, torch.float32, device) as checkpoint:
        decoder = load_decoder(config, checkpoint, kernels, 32)
    bank = LoraBank(
        [linear for layer in decoder.layers for linear in layer.linears], kernels,
        num_slots=2, max_rank=2, dtype=torch.float32, device=device,
    )  # fmt: skip
    adapters = AdapterSlots(bank, 4)
    generator = torch.Generator().manual_seed(0)
    matrices = {
        name: (
            torch.randn(2, weights.a.shape[3], generator=generator),
            torch.randn(2, weights.columns[part + 1] - weights.columns[part], generator=generator),
        )
        for name, (weights, part) in bank._places.items()
    }
    adapters.keep(HostAdapter(digest="a", rank=2, matrices=matrices, bytes=0))
    runner = Runner(
        decoder, allocate_cache(config, CacheSize(20, BLOCK, 0), torch.float32, device), kernels,
        block_size=BLOCK, max_num_seqs=4, max_model_len=32, eos_token_ids=(), device=device, adapters=adapters,
    )  # fmt: skip
    if record is not None:
        runner.capture_graphs(record)
    return runner


def new_row(row: int, tokens: tuple[int, ...], slot: int = -1) -> NewSequence:
    return NewSequence(row=row, token_ids=tokens, num_prompt_tokens=len(tokens), params=PARAMS, adapter_slot=slot)


def a_step(rows: tuple[int, ...], computed: tuple[int, ...], new: tuple[int, ...], **more: object) -> SchedulerOutput:
    blocks = more.pop("new_blocks", ((),) * len(rows))
    samples = more.pop("samples", (True,) * len(rows))
    return SchedulerOutput(step=1, rows=rows, num_computed=computed, num_new=new, new_blocks=blocks, samples=samples,
                           **more)  # fmt: skip


# Prompts, then three rows (padded to four) of which one has an adapter, one row alone, and two without adapters.
STEPS = [
    a_step(
        (0, 1, 2), (0, 0, 0), (5, 7, 2), new_blocks=((3, 7), (5, 1), (2,)),
        new_rows=(new_row(0, (5, 6, 7, 8, 9)), new_row(1, (9, 30, 8, 7, 6, 5, 4)), new_row(2, (11, 12), slot=1)),
        adapter_loads=(AdapterLoad(1, "a"),),
    ),
    a_step((0, 1, 2), (5, 7, 2), (1, 1, 1)),
    a_step((1,), (8,), (1,), new_blocks=((9,),)),
    a_step((0, 1), (6, 9), (1, 1)),
]  # fmt: skip


def tokens_of(runner: Runner) -> list[tuple[tuple[int, ...], ...]]:
    return [runner.execute(plan).token_ids for plan in STEPS]


@pytest.mark.capability("KN-5")
@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (30, (1, 2, 4, 8, 16, 24, 30)), (256, None)]
)
def test_the_sizes_that_are_recorded(most, sizes):
    assert batch_sizes(most) == (sizes or (1, 2, 4, *range(8, 257, 8)))


@pytest.mark.capability("KN-5")
def test_a_padded_step_draws_what_the_planned_step_draws(tmp_path, device):
    """With and without adapters, in a batch between two sizes; on a GPU as real graphs."""
    a_checkpoint(tmp_path)
    record = eager_capture if device.type == "cpu" else CudaCapture()
    recorded = a_runner(tmp_path, gpu, device, record)
    assert recorded.graphs is not None
    seen = watched(recorded.graphs)
    assert tokens_of(recorded) == tokens_of(a_runner(tmp_path, reference))
    assert seen == ["14 tokens", "3 rows", "1 rows", "2 rows"]


def watched(graphs: StepGraphs) -> list[str | None]:
    """For each step of a runner what came from a recording; None: it was computed as planned."""
    seen: list[str | None] = []
    inner = graphs.replay

    def replay(inputs: HostInputs, *more: object) -> StepHidden | None:
        result = inner(inputs, *more)
        size = f"{len(inputs.row_ids)} rows" if inputs.is_decode else f"{len(inputs.positions)} tokens"
        seen.append(size if result else None)
        return result

    graphs.replay = replay
    return seen


@pytest.mark.capability("KN-5")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_what_is_launched_and_what_is_read_depends_on_the_size_alone(tmp_path, device, monkeypatch):
    a_checkpoint(tmp_path)
    runner = a_runner(tmp_path, gpu, device, eager_capture)
    graphs, launches = runner.graphs._decodes, []
    inner = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        fixed = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
        launches.append((self.fn.__name__, self.grid, fixed))
        return inner(self, *args, **kwargs)

    shared = graphs._shared
    plan, lora_plan = shared.plan, shared.lora[4]
    buffers = [graphs._static, shared.tables, shared.last_tokens, plan.lengths, plan.tables, lora_plan.order,
               lora_plan.work]  # fmt: skip
    before = [buffer.data_ptr() for buffer in buffers]
    runner.execute(STEPS[0])
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    seen = []
    for rows, computed in (((0, 1, 2), (5, 7, 2)), ((0, 1, 2), (6, 8, 3)), ((2, 0, 1), (4, 7, 9))):
        launches.clear()
        plan = a_step(rows, computed, (1, 1, 1), new_blocks=tuple((10 + 3 * row,) for row in rows))
        runner.execute(plan)
        seen.append(list(launches))
    assert seen[0] == seen[1] == seen[2]
    assert {name for name, *_ in seen[0]} >= {"_decode", "_rope_and_store", "_rms_norm", "_shrink", "_expand"}
    assert [buffer.data_ptr() for buffer in buffers] == before


@pytest.mark.capability("KN-5")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_rows_behind_the_batch_are_padding(tmp_path, device):
    a_checkpoint(tmp_path)
    runner = a_runner(tmp_path, gpu, device, eager_capture)
    runner.execute(STEPS[0])
    runner.execute(STEPS[1])  # three rows, in the graph of four
    graphs = runner.graphs._decodes
    plan = graphs._shared.plan
    assert plan.lengths[:4].tolist() == [6, 8, 3, 0]
    assert plan.tables[:4, :2].tolist() == [[3, 7], [5, 1], [2, 0], [0, 0]]
    assert [buffer.tolist() for buffer in (graphs._rows, graphs._positions, graphs._slots)] == [
        [0, 1, 2, 4], [5, 7, 2, 0], [29, 7, 10, -1]
    ]  # fmt: skip


@pytest.mark.capability("KN-5", "BS-7")
def test_a_row_without_a_token_on_the_device_is_replayed_too(tmp_path, device):
    """A prompt whose cached prefix leaves one token, and a row after drafts: their tokens come from the host."""
    a_checkpoint(tmp_path)
    drafted = a_step((0, 1), (0, 0), (7, 2), new_blocks=((3, 7, 4), (5, 6, 8)), drafts=((3, 4), ()),
                     new_rows=(new_row(0, (5, 6, 7, 8, 9)), new_row(1, (9, 30))))  # fmt: skip
    record = eager_capture if device.type == "cpu" else CudaCapture()
    recorded, eager = a_runner(tmp_path, gpu, device, record), a_runner(tmp_path, reference)
    seen, results = watched(recorded.graphs), []
    for runner in (recorded, eager):
        first = runner.execute(drafted).token_ids
        kept = len(first[0])
        later = [
            a_step((0, 1), (4 + kept, 2), (1, 1)),
            a_step((0, 2), (5 + kept, 0), (1, 1), new_blocks=((), (9,)), new_rows=(new_row(2, (11,)),)),
            a_step((2, 0), (1, 6 + kept), (1, 1)),
        ]
        results.append([first, *(runner.execute(step).token_ids for step in later)])
    assert results[0] == results[1]
    assert seen == ["9 tokens", "2 rows", "2 rows", "2 rows"]


@pytest.mark.capability("KN-5")
def test_adapters_of_a_replayed_plan_are_those_of_the_step_and_no_others(device):
    weights = reference_lora.LoraWeights(8, (6,), num_slots=3, max_rank=2, dtype=torch.float32, device=device)
    plan = lora.plan_lora_for_capture(20, 3, torch.empty(0, device=device))
    for slot in range(3):  # written after the plan was made, as in serving
        weights.write(0, slot, torch.full((2, 8), slot + 1.0), torch.ones(2, 6))
    for slots in ([0] * 17 + [2, 1, 2], [-1] * 20, [1] + [-1] * 19):
        x, y = torch.ones(20, 8, device=device), torch.zeros(20, 6, device=device)
        lora.update_static_lora_inputs(plan, np.array(slots))
        lora.add_lora(x, y, weights, plan)
        assert y[:, 0].tolist() == [16.0 * (slot + 1) for slot in slots]


@pytest.mark.capability("KN-5")
def test_an_engine_whose_recording_fails_serves_on_and_says_why(tmp_path):
    a_checkpoint(tmp_path)

    def refuses(_: Callable[[], Tensor]) -> CapturedGraph:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    runner = a_runner(tmp_path, gpu)
    assert try_capture(runner, refuses, CPU) == (
        "steps could not be captured as CUDA graphs, and are launched kernel by kernel: "
        "operation not permitted when stream is capturing"
    )
    assert runner.graphs is None


@pytest.mark.capability("PF-30")
def test_a_recording_that_memory_does_not_last_for_is_a_clear_end(tmp_path):
    a_checkpoint(tmp_path)

    def too_large(_: Callable[[], Tensor]) -> CapturedGraph:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(DoesNotFitError, match="not enough memory on cpu for the CUDA graphs"):
        try_capture(a_runner(tmp_path, gpu), too_large, CPU)


@pytest.mark.capability("KN-5")
def test_only_kernels_that_say_so_are_recorded(tmp_path):
    a_checkpoint(tmp_path)
    runner = a_runner(tmp_path, reference, record=eager_capture)
    assert runner.graphs is None
    assert capturable(reference) is None
    assert capturable(gpu) is gpu


@pytest.mark.gpu
@pytest.mark.capability("KN-4")
def test_after_a_first_round_no_kernel_is_compiled_again(tmp_path):
    """Triton keeps a compiled kernel for each kind of arguments: other batches add none."""
    a_checkpoint(tmp_path)
    device = torch.device("cuda")
    runner = a_runner(tmp_path, gpu, device, CudaCapture())

    def compiled() -> int:
        kernels = [*vars(paged_attention).values(), *vars(lora).values(), *vars(norms).values(),
                   *vars(store_kv).values(), *vars(sampling).values()]  # fmt: skip
        return sum(len(one.device_caches[0][0]) for one in kernels if isinstance(one, JITFunction))

    tokens_of(runner)
    before = compiled()
    assert before > 0
    tokens_of(runner)
    runner.execute(a_step((3,), (0,), (3,), new_blocks=((18,),), new_rows=(new_row(3, (1, 2, 3)),)))
    runner.execute(a_step((0, 3), (7, 3), (1, 1), new_blocks=((12,), (13,))))
    assert compiled() == before


@pytest.fixture
def streams(monkeypatch):
    """torch.cuda's streams and graphs without a GPU: the streams that were made, and those that ran something."""
    made, used = [], []

    class Stream:
        def __init__(self, device: object = None) -> None:
            made.append(self)

        def wait_stream(self, other: object) -> None:
            """Nothing runs here."""

    class Graph:
        def replay(self) -> None:
            """Nothing was recorded."""

    def run_on(stream: object) -> object:
        used.append(stream)
        return nullcontext()

    def graph(graph: object, *, stream: object = None, **_: object) -> object:
        return run_on(stream)

    current = Stream()
    made.clear()
    for name, value in {
        "Stream": Stream, "CUDAGraph": Graph, "graph_pool_handle": lambda: None, "current_stream": lambda: current,
        "stream": run_on, "graph": graph,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    capture._capture_stream.cache_clear()
    yield made, used
    capture._capture_stream.cache_clear()


@pytest.mark.capability("KN-5")
def test_all_recordings_warm_up_and_record_on_one_stream(streams):
    """Finding 16: cuBLAS keeps a workspace of 32 MiB for each stream that it ever ran on."""
    made, used = streams
    record, computed = CudaCapture(), []
    for size in (4, 2, 1):
        record(lambda size=size: computed.append(size))
    assert computed == [4, 4, 2, 2, 1, 1], "once to warm up, once to record"
    assert len(made) == 1
    assert used == made * 6, "what is recorded runs on the stream that it was warmed up on"


def _fails() -> None:
    raise RuntimeError


@pytest.mark.capability("KN-5", "ST-7")
def test_no_old_graph_is_freed_while_another_is_recorded(streams):
    """On an H100 the collector freed the graphs of an earlier runner inside a capture, which CUDA then refused."""
    collects = []
    CudaCapture(torch.device("cuda", 0))(lambda: collects.append(gc.isenabled()))
    assert collects == [True, False], "while it warms up it may"
    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        CudaCapture(torch.device("cuda", 0)).record(_fails)
    assert gc.isenabled()


@pytest.mark.capability("KN-5", "ST-7")
def test_an_engine_that_wakes_up_records_on_the_stream_that_it_had(streams):
    """Each wake made a new stream, and cuBLAS another workspace."""
    made, used = streams
    for _ in range(3):
        CudaCapture(torch.device("cuda", 0))(lambda: None)
    assert len(made) == 1
    assert used == made * 6


@pytest.mark.capability("KN-5", "ST-7")
def test_workspaces_are_freed_while_an_engine_sleeps(monkeypatch):
    """The graphs that have their addresses are gone by then."""
    freed = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cache"))
    monkeypatch.setattr(sleep, "HostCopy", lambda tensors: None)

    class Runner:
        graphs, caches, host = object(), [1], None

        class decoder:  # noqa: N801  an attribute of the runner
            layers = ()

    runner = Runner()
    sleep.Sleeper(
        runner, torch.device("cuda", 0), load_weights=lambda: None, allocate_cache=list, capture=lambda: None
    ).sleep(1)
    assert freed == ["workspaces", "cache"]
    assert runner.graphs is None
