"""A model whose output is not finite never answers with garbage: the request ends with an error, and is counted."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import FinishReason, Output, Request, SamplingParams, SchedulerOutput
from slipway_runtime.models.pooling import LAST, MEAN
from slipway_runtime.scheduling.scheduler import INVALID_LOGITS
from slipway_runtime.worker.sampler import invalid_rows
from tests.runtime.checkpoints import a_checkpoint

# review/engine.md F12

POISON = 77  # the token whose embedding is not finite
PLAIN = [[5, 9, 30], [11] * 40, [3, 4, 5, 6, 7, 8] * 4]


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=["nan", "inf"])
def damaged(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("damaged")
    a_checkpoint(path, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = request.param
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def an_engine(path: Path, **options: object) -> Engine:
    small = {"device": "cpu", "dtype": "fp32", "kv_cache_bytes": 1 << 20, "max_num_seqs": 8}
    return build_engine(path, **(small | {"max_num_batched_tokens": 64} | options))


def run(engine: Engine) -> dict[tuple[str, int], list[Output]]:
    outputs: dict[tuple[str, int], list[Output]] = {}
    for _ in range(2000):
        if not engine.has_work:
            engine.idle()
            return outputs
        for output in engine.step(0.0).outputs:
            outputs.setdefault((output.request_id, output.index), []).append(output)
    raise AssertionError("still at work")


def ask(engine: Engine, id: str, prompt: list[int], n: int = 1, **fields: object) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, **{"temperature": 0.0, **fields})
    engine.add(Request(id=id, prompt_token_ids=tuple(prompt), params=params, arrived=0.0, n=n), 0.0)


SAMPLING = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 3},
    "truncated": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
    "logprobs": {"logprobs": 5},
    "penalties and bias": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": ((4, 2.0),)},
}


@pytest.mark.parametrize("fields", SAMPLING.values(), ids=SAMPLING.keys())
@pytest.mark.parametrize("speculation", ["", "prompt_lookup"])
def test_the_request_ends_with_an_error_and_its_neighbours_answer_as_if_alone(damaged, fields, speculation):
    options = {"speculation": speculation} if speculation else {}
    alone = an_engine(damaged, **options)
    for index, prompt in enumerate(PLAIN):
        ask(alone, str(index), prompt, **fields)
    expected = {key: [token for one in parts for token in one.token_ids] for key, parts in run(alone).items()}

    engine = an_engine(damaged, **options)
    ask(engine, "broken", [5, POISON, 9], n=2, **fields)
    for index, prompt in enumerate(PLAIN):
        ask(engine, str(index), prompt, **fields)
    outputs = run(engine)
    for key, tokens in expected.items():
        assert [token for one in outputs[key] for token in one.token_ids] == tokens
    for index in range(2):
        (last,) = outputs["broken", index]
        assert last.finish_reason is FinishReason.ERROR
        assert last.token_ids == ()
        assert last.error == INVALID_LOGITS
    stats = engine.stats(0.0)
    assert stats.invalid_logits == 2
    assert stats.admitted == stats.finished + stats.aborted == len(PLAIN) + 2


def test_the_kv_of_such_a_request_is_not_found_by_the_next_one(damaged):
    engine = an_engine(damaged)
    prompt = [5, POISON, *range(10, 60)]
    for id in ("first", "second"):
        ask(engine, id, prompt)
        (last,) = run(engine)[id, 0]
        assert last.finish_reason is FinishReason.ERROR
    assert engine.stats(0.0).prefix_hits == 0


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_an_embedding_that_is_not_finite_is_an_error_too(damaged, pooling):
    engine = an_engine(damaged, pooling=pooling)
    ask(engine, "broken", [5, POISON], pools_all=pooling == MEAN)
    ask(engine, "whole", [5, 9], pools_all=pooling == MEAN)
    outputs = run(engine)
    assert outputs["broken", 0][-1].error == INVALID_LOGITS
    assert np.isfinite(np.frombuffer(outputs["whole", 0][-1].embedding, dtype="<f4")).all()


def test_only_kept_samples_make_a_row_invalid():
    plan = SchedulerOutput(
        step=1, rows=(0, 1, 2), num_computed=(4, 4, 4), num_new=(1, 3, 5), samples=(True, True, False),
        drafts=((), (7, 8), ()),
    )  # fmt: skip
    kept = ((3,), (7, 9), ())  # the second draft was rejected
    valid = np.array([True, True, True, False])
    assert invalid_rows(plan, valid, kept) == ()
    assert invalid_rows(plan, np.array([True, True, False, True]), kept) == (1,)
    assert invalid_rows(plan, np.array([False, True, True, True]), kept) == (0,)
