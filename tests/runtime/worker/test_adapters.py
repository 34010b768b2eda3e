"""Rows of several adapters and of the base model in one batch, each as if its adapter were merged into the weights."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import AdapterLoad, NewSequence, SamplingParams, SchedulerOutput
from slipway_runtime.models.adapter_weights import read_adapter
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import read_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.worker.adapter_slots import AdapterSlots
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.runner import Runner
from tests.runtime.adapter_folders import ATTENTION, an_adapter, merged
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.models.logits import assert_close, oracle, some_tokens

BLOCK, BLOCKS_A_ROW = 4, 10
CPU = torch.device("cpu")
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},  # has biases
    "qwen3": {"head_dim": 16},  # norms heads
    "mistral": {"sliding_window": None, "head_dim": 12},
    "gemma3_text": {"head_dim": 12},  # norms what is added, and heads
}


class Listening(Runner):
    """A runner whose scores can be heard."""

    heard: torch.Tensor

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = super().logits(hidden)
        self.heard = scores.clone()
        return scores


def a_runner(path: Path, *, max_adapters: int = 3, max_rank: int = 8, deterministic: bool = False) -> Listening:
    config, kernels = read_config(path), kernels_for(CPU, torch.float32)
    with Checkpoint(path, torch.float32, CPU) as checkpoint:
        decoder = load_decoder(config, checkpoint, kernels, 100)
    adapters = None
    if max_adapters:
        linears = [linear for layer in decoder.layers for linear in layer.linears]
        bank = LoraBank(linears, kernels, num_slots=max_adapters, max_rank=max_rank, dtype=torch.float32, device=CPU,
                        deterministic=deterministic)  # fmt: skip
        adapters = AdapterSlots(bank, max_num_seqs=6)
    return Listening(
        decoder, allocate_cache(config, CacheSize(80, BLOCK, 0), torch.float32, CPU), kernels, block_size=BLOCK,
        max_num_seqs=6, max_model_len=BLOCK * BLOCKS_A_ROW, eos_token_ids=(), device=CPU, adapters=adapters,
    )  # fmt: skip


def keep(runner: Runner, folder: Path, base: Path, max_rank: int = 8) -> str:
    """Read an adapter into the runner's host memory; its digest."""
    adapter = read_adapter(folder, read_config(base), max_rank=max_rank, dtype=torch.float32)
    assert runner.adapters is not None
    runner.adapters.keep(adapter)
    return adapter.digest


@dataclass
class Row:
    """One sequence, computed as far as it was asked to."""

    index: int
    tokens: list[int]
    slot: int = -1
    computed: int = 0
    scores: list[torch.Tensor] = field(default_factory=list)  # of the last token of every step that sampled one

    def follows(self, model: PreTrainedModel) -> None:
        """Every score heard is the one of this model."""
        expected = oracle(model, self.tokens[:-1])[-len(self.scores) :]
        assert self.scores
        assert_close(torch.stack(self.scores), expected)


def step(runner: Listening, *work: tuple[Row, int], loads: tuple[AdapterLoad, ...] = ()) -> None:
    """Compute so many tokens of each row, single ones first."""
    work = tuple(sorted(work, key=lambda item: item[1] != 1))
    new = [row for row, _ in work if row.computed == 0]
    samples = tuple(row.computed + count == len(row.tokens) for row, count in work)
    plan = SchedulerOutput(
        step=1,
        new_rows=tuple(
            NewSequence(row=row.index, token_ids=tuple(row.tokens), num_prompt_tokens=len(row.tokens),
                   params=SamplingParams(max_tokens=9, temperature=0.0), adapter_slot=row.slot)
            for row in new
        ),
        adapter_loads=loads,
        rows=tuple(row.index for row, _ in work),
        num_computed=tuple(row.computed for row, _ in work),
        num_new=tuple(count for _, count in work),
        new_blocks=tuple(
            tuple(range(1 + row.index * BLOCKS_A_ROW, 1 + (row.index + 1) * BLOCKS_A_ROW)) if row in new else ()
            for row, _ in work
        ),
        samples=samples,
    )  # fmt: skip
    sampled = runner.execute(plan).token_ids
    heard = iter(runner.heard if any(samples) else ())
    for (row, count), tokens in zip(work, sampled, strict=True):
        row.computed += count
        row.tokens += tokens
        row.scores += [next(heard) for _ in tokens]


@dataclass
class Mixed:
    """A base model, three adapters that have little in common, and a runner that holds all of them."""

    model: PreTrainedModel
    base: Path
    folders: dict[str, Path]
    runner: Listening
    loads: tuple[AdapterLoad, ...]


def a_mix(path: Path, family: str = "llama", **options: object) -> Mixed:
    base = path / "base"
    model = a_checkpoint(base, family, **FAMILIES[family])
    folders = {
        "a": an_adapter(path / "a", model, rank=4, alpha=8, seed=1),
        "b": an_adapter(path / "b", model, rank=8, alpha=3, rslora=True, seed=2,
                        modules=("q_proj", "v_proj", "down_proj"),
                        ranks={"v_proj": 3, "layers.1.mlp.down_proj": 5}, alphas={"q_proj": 7.5}),
        "c": an_adapter(path / "c", model, rank=1, alpha=2, seed=3, modules=(*ATTENTION[1:], "gate_proj"), layers=(1,),
                        dtype=torch.bfloat16),
    }  # fmt: skip
    runner = a_runner(base, **options)
    loads = tuple(AdapterLoad(slot, keep(runner, folders[name], base)) for slot, name in ((2, "a"), (0, "b"), (1, "c")))
    return Mixed(model, base, folders, runner, loads)


def some_rows(*slots: int) -> list[Row]:
    return [Row(index, some_tokens(9 + 4 * index, seed=index), slot) for index, slot in enumerate(slots)]


def run(runner: Listening, rows: list[Row], loads: tuple[AdapterLoad, ...] = ()) -> None:
    """Whole prompts, chunks and single tokens, in batches that mix all rows."""
    a, b, c, base, again = rows
    step(runner, (a, 9), (b, 5), (c, 1), (base, 12), loads=loads)
    step(runner, (a, 1), (b, 8), (c, 16), (base, 9), (again, 20))
    step(runner, (a, 1), (b, 1), (c, 1), (base, 1), (again, 5))
    step(runner, *((row, 1) for row in rows))
    step(runner, (b, 1), (base, 1))
    step(runner, (base, 1))


@pytest.mark.capability("ML-1")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_a_mixed_batch_equals_its_merged_model(family, tmp_path):
    mix = a_mix(tmp_path, family)
    rows = some_rows(2, 0, 1, -1, 2)
    run(mix.runner, rows, mix.loads)
    for row, name in zip(rows, ("a", "b", "c", None, "a"), strict=True):
        row.follows(mix.model if name is None else merged(mix.model, mix.folders[name]))


@pytest.mark.capability("ML-1", "KN-3")
def test_rows_of_the_base_model_are_those_of_an_engine_without_adapters_bit_for_bit(tmp_path):
    mix = a_mix(tmp_path)
    ours = some_rows(2, -1, 0, -1, -1)
    theirs = some_rows(-1, -1, -1, -1, -1)
    run(mix.runner, ours, mix.loads)
    run(a_runner(mix.base, max_adapters=0), theirs)
    for index in (1, 3, 4):
        assert ours[index].tokens == theirs[index].tokens
        assert torch.equal(torch.stack(ours[index].scores), torch.stack(theirs[index].scores))
    assert not torch.equal(ours[0].scores[0], theirs[0].scores[0])


@pytest.mark.capability("ML-1")
def test_the_tiles_of_deterministic_mode_compute_the_merged_models_too(tmp_path):
    mix = a_mix(tmp_path, deterministic=True)
    rows = some_rows(2, 0, 1, -1, 2)
    run(mix.runner, rows, mix.loads)
    for row, name in zip(rows, ("a", "b", "c", None, "a"), strict=True):
        row.follows(mix.model if name is None else merged(mix.model, mix.folders[name]))


@pytest.mark.capability("ML-5")
def test_an_adapter_takes_the_slot_of_another_between_steps(tmp_path):
    mix = a_mix(tmp_path)
    first, second = Row(0, some_tokens(9, seed=1), slot=2), Row(1, some_tokens(9, seed=1), slot=2)
    step(mix.runner, (first, 9), loads=mix.loads)
    step(mix.runner, (second, 9), loads=(AdapterLoad(2, mix.loads[2].digest),))  # smaller and on fewer modules
    first.follows(merged(mix.model, mix.folders["a"]))
    second.follows(merged(mix.model, mix.folders["c"]))
    assert mix.runner.adapters is not None
    assert mix.runner.adapters.digests == (mix.loads[1].digest, mix.loads[2].digest, mix.loads[2].digest)


@pytest.mark.capability("ML-5", "ML-9")
def test_a_slot_cannot_be_given_away_under_a_running_row(tmp_path):
    mix = a_mix(tmp_path)
    rows = some_rows(2, 0)
    step(mix.runner, *((row, len(row.tokens)) for row in rows), loads=mix.loads)
    steal = (AdapterLoad(2, mix.loads[1].digest),)
    with pytest.raises(AssertionError, match="slot 2 was given away under row 0"):
        step(mix.runner, *((row, 1) for row in rows), loads=steal)


@pytest.mark.capability("ML-5")
def test_a_row_cannot_begin_with_an_empty_slot(tmp_path):
    mix = a_mix(tmp_path)
    with pytest.raises(AssertionError, match="slot 2 holds nothing"):
        step(mix.runner, (Row(0, some_tokens(9, seed=1), slot=2), 9))


@pytest.mark.capability("ML-5")
def test_an_emptied_slot_computes_nothing(tmp_path):
    mix = a_mix(tmp_path)
    row = Row(0, some_tokens(9, seed=1))
    step(mix.runner, (Row(1, [5], slot=2), 1), loads=mix.loads)
    adapters = mix.runner.adapters
    assert adapters is not None
    for slot in range(3):
        adapters.unload(slot)
    assert adapters.digests == ("", "", "")
    assert not any(weights.slots or weights.a.any() or weights.b.any() for weights in adapters._bank._weights)
    adapters.forget(mix.loads[0].digest)
    with pytest.raises(KeyError):
        step(mix.runner, (row, 9), loads=mix.loads[:1])


def test_slots_cost_what_the_planner_is_told(tmp_path):
    from slipway_runtime.models.adapter_weights import slot_bytes

    mix = a_mix(tmp_path, max_rank=8)
    assert mix.runner.adapters is not None
    assert mix.runner.adapters.nbytes == 3 * slot_bytes(read_config(mix.base), 8, 4)
