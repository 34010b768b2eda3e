"""A capture of CUDA graphs that fails on one rank stops all ranks within seconds, and a sentence names the rank."""

import msgspec
import pytest

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.engine.ranks import RankDiedError
from slipway_runtime.messages import EngineFailed, Request, SamplingParams
from tests.runtime.engine.capturing import fail_in
from tests.runtime.engine.test_ranks import OPTIONS, TINY

# Each test would wait for five minutes, the patience of a sum, if the ranks did not agree.
pytestmark = pytest.mark.timeout(60)


def answer_of(engine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add(Request(id="a", prompt_token_ids=(1, 5, 9), params=params, arrived=0.0), 0.0)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step(0.0).outputs for token in output.token_ids]
    return tokens


@pytest.mark.capability("DD-3", "KN-5")
@pytest.mark.parametrize("fault", ["1 record 2", "0 record 1", "1 record 4"])
def test_graphs_that_one_rank_cannot_capture_are_used_by_none(fault, tmp_path, monkeypatch):
    """The others went on to the next size, whose sums the failed rank never joined."""
    whole = build_engine(TINY, msgspec.structs.replace(OPTIONS, tensor_parallel_size=1))
    fail_in(fault, tmp_path, monkeypatch)
    engine = build_engine(TINY, OPTIONS)
    assert engine.facts.graphs_failed == (
        "steps could not be captured as CUDA graphs, and are launched kernel by kernel: "
        f"on rank {fault[0]} of 2: operation not permitted when stream is capturing"
    )
    assert answer_of(engine) == answer_of(whole)


@pytest.mark.capability("DD-3", "KN-5")
def test_graphs_that_all_ranks_have_are_used(tmp_path, monkeypatch):
    fail_in("7 record 1", tmp_path, monkeypatch)
    assert build_engine(TINY, OPTIONS).facts.graphs_failed == ""


@pytest.mark.capability("DD-3", "KN-5")
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("1 run 2", "rank 1 failed: RuntimeError: operation not permitted"),
        ("0 run 2", "rank 0 of 2 failed while it captured steps, and the others cannot come out of it: operation not"),
    ],
)
def test_a_rank_that_fails_among_the_sums_of_the_others_ends_the_engine(fault, sentence, tmp_path, monkeypatch):
    """It waited for the others to capture, and they for its part of a sum."""
    fail_in(fault, tmp_path, monkeypatch)
    deaths: list[EngineFailed] = []
    with pytest.raises(RankDiedError, match=sentence):
        build_engine(TINY, OPTIONS, on_death=deaths.append)
    if fault[0] == "1":
        assert sentence in deaths[0].error
