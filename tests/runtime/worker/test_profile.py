"""The widest step is paid for before the cache is: what is left is the cache, and too little is one sentence."""

from dataclasses import replace

import pytest
import torch

from slipway_runtime.engine import parts
from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.decide import decide
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.models.config import DoesNotFitError, parse_config, read_config
from slipway_runtime.worker import kv_cache, profile
from slipway_runtime.worker.graphs import WORKSPACE_BYTES
from slipway_runtime.worker.profile import check_remainder, dummy_step, widest_step_bytes
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.machine import CPU, TINY, Machine
from tests.runtime.models.test_config import LLAMA


@pytest.mark.capability("KV-5")
def test_the_budget_is_what_the_widest_step_leaves(monkeypatch):
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: 10_000)
    assert kv_cache.default_budget_bytes(CPU, 0.85) == 2_500
    assert kv_cache.default_budget_bytes(CPU, 0.85, activations=6_000) == 1_000
    assert kv_cache.default_budget_bytes(CPU, 0.85, activations=60_000) == 0
    machine, config, kernels = Machine(rows=1), parse_config(LLAMA), kernels_for(CPU, torch.float32)
    few, many = (
        widest_step_bytes(machine.decoder, config, kernels, tokens=tokens, rows=1, block_size=16,
                          dtype=torch.float32, device=CPU)
        for tokens in (64, 512)
    )  # fmt: skip
    assert many == 8 * few > 0


@pytest.mark.capability("KV-5", "PF-30")
def test_a_cache_that_leaves_no_room_for_a_step_is_refused_before_it_is_ready(tmp_path):
    check_remainder(600, 400, 1000)
    with pytest.raises(DoesNotFitError, match="KV cache of 600 bytes and 401 for the widest step exceed the 1000"):
        check_remainder(600, 401, 1000)
    a_checkpoint(tmp_path)
    with pytest.raises(DoesNotFitError, match="lower maxNumBatchedTokens or maxNumSeqs"):
        build_engine(tmp_path, kv_cache_bytes=1 << 60)


@pytest.mark.parametrize("tokens", [1, 16, 17, 40])
def test_a_dummy_step_goes_through_the_whole_model(tokens):
    machine, config = Machine(rows=1), read_config(TINY)
    seen = []
    scores = machine.decoder.logits
    machine.decoder.logits = lambda hidden: seen.append(scores(hidden)) or seen[0]  # type: ignore[method-assign]
    kernels = kernels_for(CPU, torch.float32)
    dummy_step(machine.decoder, config, kernels, tokens=tokens, rows=8, block_size=16, dtype=torch.float32, device=CPU)
    assert seen[0].shape == (min(tokens, 8), config.vocab_size)
    assert bool(seen[0].isfinite().all())


@pytest.mark.capability("KV-5")
def test_what_the_widest_step_leaves_with_the_allocator_is_not_counted_twice(monkeypatch):
    """Finding A4: the driver counts memory that the allocator keeps, and the widest step was taken off beside it."""
    kept, device = {"bytes": 0}, torch.device("cuda", 0)
    for name, does in {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 50,
        "max_memory_allocated": lambda device: 50 + kept["bytes"],
        "empty_cache": lambda: kept.update(bytes=0),
        "mem_get_info": lambda device: (1000 - 50 - kept["bytes"], 1000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, does)
    monkeypatch.setattr(profile, "dummy_step", lambda *_, **__: kept.update(bytes=300))
    machine = Machine(rows=1)
    widest = widest_step_bytes(
        machine.decoder, parse_config(LLAMA), kernels_for(CPU, torch.float32), tokens=8, rows=1, block_size=16,
        dtype=torch.float32, device=device,
    )  # fmt: skip
    assert widest == 300
    assert kv_cache.default_budget_bytes(device, 1.0, widest) == 1000 - 50 - 300


@pytest.mark.capability("KV-5")
@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({}, 8),
        ({"speculation": "promptLookup"}, 8 * (1 + 4)),
        ({"speculation": "promptLookup", "speculation_max_tokens": 2}, 8 * (1 + 2)),
        ({"speculation": "promptLookup", "speculation_max_tokens": 32}, 64),
        ({"speculation": "promptLookup", "max_num_batched_tokens": 8}, 8),
    ],
)
def test_the_logits_of_verified_drafts_are_paid_for_before_the_cache_is(settings, samples, monkeypatch):
    """256 rows with 4 drafts of a vocabulary of 151,936 are 778 MB of logits, of which 156 were profiled."""
    taken = []
    monkeypatch.setattr(parts, "widest_step_bytes", lambda *_, rows, **__: taken.append(rows) or 1000)
    options = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 20}
    plan = decide(TINY, EngineOptions(**{**options, **settings}))
    parts.size_pool(plan, Machine(rows=1).decoder, kernels_for(plan.device, plan.dtype))
    assert taken == [samples]


@pytest.mark.capability("KN-5", "KV-5")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_graphs_of_decode_steps_are_within_the_budget(ranks, monkeypatch):
    """Finding A4: they were captured after the KV cache had taken all there was."""
    options = EngineOptions(device="cpu", dtype="bf16", tensor_parallel_size=ranks)
    plan = replace(decide(TINY, options), device=torch.device("cuda", 0))
    taken = []
    monkeypatch.setattr(parts, "widest_step_bytes", lambda *_, **__: 1000)
    monkeypatch.setattr(parts, "default_budget_bytes", lambda device, share, bytes: taken.append(bytes) or 1 << 30)
    parts.size_pool(plan, Machine(rows=1).decoder, kernels_for(plan.device, plan.dtype))
    assert taken[0] > 1000 + WORKSPACE_BYTES
