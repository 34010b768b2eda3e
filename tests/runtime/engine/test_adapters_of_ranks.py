"""Adapters and the vocabulary of a model that two processes share: what one process says, or a refusal of both."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.ranks import RankDiedError, SharedSleeper, SharedSlots
from slipway_runtime.messages import LoadAdapter, Reply, Sleep, UnloadAdapter, WakeUp
from slipway_runtime.models.adapter_weights import adapter_digest, read_adapter, slot_bytes
from slipway_runtime.models.config import read_config
from slipway_runtime.models.sharding import Shard, part_of
from tests.runtime.adapter_folders import ATTENTION, an_adapter, merged
from tests.runtime.checkpoints import a_checkpoint, greedy
from tests.runtime.engine import test_embeddings
from tests.runtime.engine.test_adapters import SHARED, Served
from tests.runtime.engine.test_logprobs import PROMPT, a_request, outputs
from tests.runtime.engine.test_ranks import ranks_of

TWO = {"tensor_parallel_size": 2, "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, dict[str, Path]]:
    path = tmp_path_factory.mktemp("base")
    model = a_checkpoint(path / "model")
    some = ("q_proj", "down_proj", "up_proj")
    folders = {
        "a": an_adapter(path / "a", model, rank=4, alpha=6, seed=1),
        "b": an_adapter(path / "b", model, rank=8, alpha=3, rslora=True, modules=some, seed=2),
        "c": an_adapter(path / "c", model, rank=1, alpha=2, modules=ATTENTION[1:], seed=3),
    }
    return path / "model", model, folders


@pytest.mark.capability("DD-3", "ML-1", "ML-5")
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_two_ranks_give_each_request_the_text_of_its_merged_model(deterministic, base):
    """More adapters than slots, and more than host memory holds: they are loaded, forgotten and read again."""
    path, model, folders = base
    served = Served(
        path, max_adapters=1, max_cpu_adapters=2, max_rank=8, max_num_batched_tokens=48, speculation="promptLookup",
        deterministic=deterministic, **TWO,
    )  # fmt: skip
    models = {"": model} | {name: merged(model, folder) for name, folder in folders.items()}
    prompts = {}
    for turn in range(3):
        digests = {"": ""} | {name: served.load(folder) for name, folder in folders.items()}
        asked = {f"{turn}{name}": (name, [*SHARED, 3 + turn]) for name in ("a", "", "b", "c")}
        for id, (name, prompt) in asked.items():
            served.ask(id, prompt, digests[name])
        prompts |= asked
        served.finish(len(prompts))
    assert served.texts == {id: greedy(models[name], prompt, 16) for id, (name, prompt) in prompts.items()}
    assert served.engine.stats(0.0).prefix_hits > 0
    assert served.engine.stats(0.0).invalid_kv_blocks == 0


@pytest.mark.capability("DD-3", "ML-1")
def test_a_rank_holds_its_share_of_an_adapter_and_no_more(base):
    path, _, folders = base
    config = read_config(path)
    whole, first, second = (
        read_adapter(folders["a"], config, max_rank=4, dtype=torch.float32, share=share)
        for share in (Shard(), Shard(0, 2), Shard(1, 2))
    )
    assert first.digest == second.digest == whole.digest
    assert first.bytes == second.bytes == slot_bytes(part_of(config, 2), 4, 4)
    for module, (a, b) in whole.matrices.items():
        (a0, b0), (a1, b1) = first.matrices[module], second.matrices[module]
        if module.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat((a0, a1), dim=1), a)
            assert torch.equal(b0, b)
            assert torch.equal(b1, b)
        else:
            assert torch.equal(torch.cat((b0, b1), dim=1), b)
            assert torch.equal(a0, a)
            assert torch.equal(a1, a)


@pytest.mark.capability("DD-3", "ML-4")
def test_an_adapter_that_one_rank_cannot_read_is_refused_by_all_and_read_again_later(base, tmp_path):
    path, model, _ = base
    served = Served(path, max_adapters=2, max_rank=8, **TWO)
    slots = served.engine._adapters._keep.__self__
    assert isinstance(slots, SharedSlots)
    ranks = slots._ranks
    folder = an_adapter(tmp_path / "late", model, rank=2, seed=5)
    file, away, digest = folder / "adapter_model.safetensors", tmp_path / "away", adapter_digest(folder)
    send = ranks._send_to_all

    def lose_the_file(order: object) -> None:
        if type(order).__name__ == "RankReadAdapter" and file.exists():
            file.rename(away)  # rank 0 has read it
        send(order)  # type: ignore[arg-type]

    ranks._send_to_all = lose_the_file  # type: ignore[method-assign,assignment]
    served.engine.control(LoadAdapter(call=3, digest=digest, path=str(folder)), 0.0)
    served.until(lambda: bool(served.replies))
    (reply,) = served.replies
    assert reply.error.startswith("rank 1: ")
    served.replies.clear()
    del ranks._send_to_all  # the method again
    away.rename(file)
    served.ask("base", SHARED)
    served.finish(1)
    served.engine.control(UnloadAdapter(call=4, digest=digest), 0.0)
    served.until(lambda: bool(served.replies))
    assert served.replies == [Reply(call=4)]
    served.replies.clear()
    served.load(folder)
    served.ask("again", SHARED, digest)
    served.finish(2)
    assert served.texts["base"] == greedy(model, SHARED, 16)
    assert served.texts["again"] == greedy(merged(model, folder), SHARED, 16)


@pytest.mark.capability("DD-3", "ML-4")
def test_a_rank_that_dies_before_it_reads_an_adapter_ends_the_engine(base):
    path, _, folders = base
    served = Served(path, max_adapters=1, max_rank=8, **TWO)
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)
    served.engine.control(LoadAdapter(call=3, digest=adapter_digest(folders["a"]), path=str(folders["a"])), 0.0)
    served.ask("one", SHARED)
    with pytest.raises(RankDiedError, match="rank 1 of 2 was killed"):
        served.until(lambda: len(served.last) == 1)


@pytest.mark.capability("DD-3", "ST-7", "ML-1")
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_in_the_slots_of_all_ranks_outlive_sleep(level, base):
    path, model, folders = base
    served = Served(path, max_adapters=2, max_rank=8, **TWO)
    digest = served.load(folders["a"])
    served.ask("before", SHARED, digest)
    served.finish(1)
    assert isinstance(served.engine._sleeper, SharedSleeper)
    for message in (Sleep(call=1, level=level), WakeUp(call=2)):
        served.engine.control(message, 0.0)
        served.until(lambda: bool(served.replies))
        assert served.replies.pop().error == ""
    later = served.load(folders["b"])
    served.ask("after", SHARED, digest)
    served.ask("later", SHARED, later)
    served.finish(3)
    assert served.texts["before"] == served.texts["after"] == greedy(merged(model, folders["a"]), SHARED, 16)
    assert served.texts["later"] == greedy(merged(model, folders["b"]), SHARED, 16)


@pytest.mark.capability("DD-3", "API-11")
def test_logprobs_of_prompts_and_answers_are_those_of_one_process(base):
    """The other rank computes its part of the logits as often as rank 0 asks for them."""
    path, _, _ = base
    found = []
    for settings in ({}, TWO):
        engine = build_engine(path, kv_cache_bytes=4 << 20, max_num_seqs=4, max_num_batched_tokens=16, **settings)
        found.append(
            outputs(
                engine,
                a_request("scored", prompt_logprobs=2, logprobs=3, temperature=0.0),
                a_request("short", PROMPT[:5], prompt_logprobs=0, max_tokens=1, temperature=0.0),
                a_request("plain", PROMPT[:9], temperature=1.0, seed=3),
            )
        )
    alone, shared = found
    assert alone.keys() == shared.keys()
    for key, answers in alone.items():
        ours = [one for output in answers for one in (*(output.prompt_logprobs or ()), *(output.logprobs or ())) if one]
        theirs = [
            one for output in shared[key] for one in (*(output.prompt_logprobs or ()), *(output.logprobs or ())) if one
        ]
        assert [(one.token_id, one.rank) for one in ours] == [(one.token_id, one.rank) for one in theirs]
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)
    assert sum(len(output.prompt_logprobs or ()) for output in shared["scored", 0]) == len(PROMPT)


@pytest.mark.capability("DD-3", "API-16")
def test_two_ranks_embed_as_one(base):
    """No rank computes logits: lm_head is not read."""
    path, _, _ = base
    prompts = [list(PROMPT[:40]), list(PROMPT[3:9])]
    one, two = (
        test_embeddings.embed(test_embeddings.an_engine(path, "mean", **settings), prompts) for settings in ({}, TWO)
    )
    for expected, actual in zip(one, two, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.capability("DD-3", "ML-1")
def test_ranks_that_share_a_key_value_head_hold_its_part_of_an_adapter(base):
    """review/engine.md F3"""
    path, _, folders = base
    config = read_config(path)
    whole = read_adapter(folders["c"], config, max_rank=4, dtype=torch.float32).matrices
    for rank in range(4):
        own = read_adapter(folders["c"], config, max_rank=4, dtype=torch.float32, share=Shard(rank, 4)).matrices
        head = slice(rank // 2 * config.head_dim, (rank // 2 + 1) * config.head_dim)
        for module in (name for name in whole if name.endswith(("k_proj", "v_proj"))):
            assert torch.equal(own[module][1], whole[module][1][:, head])
