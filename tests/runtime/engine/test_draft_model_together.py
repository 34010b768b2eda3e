"""A draft model with all that shares an engine with it: grammars, adapters, stops, aborts, preemptions, prefixes.

Whatever happens in whatever order, each answer is that of an engine without drafts, or a part of it if it was aborted.
"""

import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipway_runtime.messages import FinishReason, Request, ResetPrefixCache, SamplingParams
from slipway_runtime.scheduling.draft_activity import DraftActivity
from tests.runtime.engine.everything import GRAMMAR, NO_SPACES, Model, Served, a_model

SIZES = {"kv_cache_bytes": 1 << 18, "max_adapters": 2, "max_rank": 8, "deterministic": True, "block_size": 8}


class Arrival(NamedTuple):
    after: int  # steps after the one before
    prompt: int  # which
    length: int
    max_tokens: int
    temperature: float
    adapter: int
    grammar: bool
    stop: int | None  # a token that ends the answer
    abort_after: int | None
    pause_for: int | None
    n: int


arrivals = st.lists(
    st.builds(
        Arrival,
        after=st.integers(0, 6),
        prompt=st.integers(0, 2),
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 30),
        temperature=st.sampled_from([0.0, 0.0, 0.9]),
        adapter=st.integers(0, 2),
        grammar=st.sampled_from([False, False, True]),
        stop=st.none() | st.integers(3, 3000),
        abort_after=st.none() | st.none() | st.integers(0, 15),
        pause_for=st.none() | st.none() | st.integers(1, 10),
        n=st.sampled_from([1, 1, 2]),
    ),
    min_size=2,
    max_size=7,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return a_model(tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def engines(model: Model) -> Iterator[dict[str, Served]]:
    """Without drafts and much memory; with the model as its own draft model and little, without and with overlap."""
    drafts = {"speculation": "draft", "draft_model": str(model.path), "speculation_max_tokens": 5}
    built = {
        "plain": Served(model, **SIZES | {"kv_cache_bytes": 1 << 20}),
        "drafting": Served(model, **SIZES, **drafts),
        "overlapping": Served(model, **SIZES, **drafts, overlap=True),
    }
    yield built
    built.clear()


def request(name: str, arrival: Arrival, digests: list[str]) -> Request:
    prompt = tuple(3 + (arrival.prompt * 997 + position * position * 13) % 3000 for position in range(arrival.length))
    return Request(
        id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(
            max_tokens=arrival.max_tokens,
            temperature=arrival.temperature,
            seed=arrival.prompt,
            ignore_eos=not arrival.grammar,
            stop_token_ids=() if arrival.stop is None else (arrival.stop,),
            logit_bias=NO_SPACES if arrival.grammar else (),
        ),
        arrived=0.0,
        adapter=digests[arrival.adapter],
        grammar=GRAMMAR if arrival.grammar else None,
        n=arrival.n,
    )


class Played:
    """One run of arrivals on an engine that was used before."""

    number = 0

    def __init__(self, served: Served, arrivals: list[Arrival], *, disturbed: bool) -> None:
        Played.number += 1
        self.served = served
        served.outputs.clear()
        if (speculation := served.engine._scheduler.speculation) is not None:  # no run has to rest for the one before
            speculation.of_model, speculation.lookup = DraftActivity(), DraftActivity()
        self.names = [f"run{Played.number}-{index}" for index in range(len(arrivals))]
        self.steps = 0
        later: list[tuple[int, str, str]] = []
        for name, arrival in zip(self.names, arrivals, strict=True):
            if disturbed:
                self._step(arrival.after, later)
            served.engine.add(request(name, arrival, served.digests), 0.0)
            if disturbed and arrival.abort_after is not None:
                later.append((self.steps + arrival.abort_after, "abort", name))
            if disturbed and arrival.pause_for is not None:
                served.engine._scheduler.pause(name, True, 0.0)
                later.append((self.steps + arrival.pause_for, "resume", name))
        self._adapter_read = threading.Event()
        served.engine._adapters.wake = self._adapter_read.set
        while later or self._is_unfinished(arrivals):
            if not later and not served.engine.has_work:  # all that is left waits for an adapter that was evicted
                assert self._adapter_read.wait(60), "an adapter is not read"
                self._adapter_read.clear()
            self._step(1, later)
        served.finish()

    def _is_unfinished(self, arrivals: list[Arrival]) -> bool:
        ends = [
            self.served.outputs.get((name, choice), [None])[-1]
            for name, arrival in zip(self.names, arrivals, strict=True)
            for choice in range(arrival.n)
        ]
        return any(end is None or end.finish_reason is None for end in ends)

    def _step(self, count: int, later: list[tuple[int, str, str]]) -> None:
        engine = self.served.engine
        for _ in range(count):
            for due in [one for one in later if one[0] <= self.steps]:
                later.remove(due)
                if due[1] == "abort":
                    engine.abort(due[2], FinishReason.CANCELLED, 0.0)
                else:
                    engine._scheduler.pause(due[2], False, 0.0)
            self.steps += 1
            if engine.has_work:
                for output in engine.step(0.0).outputs:
                    self.served.outputs.setdefault((output.request_id, output.index), []).append(output)
                engine._scheduler.check()

    def answer(self, index: int, choice: int) -> tuple[list[int], FinishReason | None]:
        outputs = self.served.outputs[self.names[index], choice]
        return self.served.tokens(self.names[index], choice), outputs[-1].finish_reason


@pytest.mark.capability("SD-4", "SD-1", "SO-1", "ML-1", "KV-6")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=arrivals, forget=st.booleans())
def test_with_a_draft_model_every_answer_is_what_it_is_without(arrivals, forget, engines):
    plain = Played(engines["plain"], arrivals, disturbed=False)
    wanted = [[plain.answer(index, choice) for choice in range(one.n)] for index, one in enumerate(arrivals)]
    for kind in ("drafting", "overlapping"):
        if forget:
            engines[kind].engine.control(ResetPrefixCache(call=1), 0.0)
        played = Played(engines[kind], arrivals, disturbed=True)
        for index, arrival in enumerate(arrivals):
            for choice in range(arrival.n):
                text, reason = played.answer(index, choice)
                whole, expected = wanted[index][choice]
                if reason is FinishReason.CANCELLED:
                    assert text == whole[: len(text)]
                else:
                    assert (text, reason) == (whole, expected)
        stats = engines[kind].engine.stats(0.0)
        assert stats.blocks_live == stats.draft_model.blocks_live == 0
        assert stats.accepted_tokens <= stats.draft_tokens


@pytest.mark.capability("SD-4")
def test_these_engines_draft_preempt_and_find_prefixes(engines):
    """What the test above would prove nothing without."""
    busy = [Arrival(0, number % 3, 40, 40, 0.0, 0, False, None, None, None, 1) for number in range(6)]
    counted = {kind: engines[kind].engine.stats(0.0) for kind in ("drafting", "overlapping")}
    for kind in counted:
        Played(engines[kind], busy, disturbed=True)
        accepted = engines[kind].engine.stats(0.0).draft_model.accepted_tokens
        assert accepted > counted[kind].draft_model.accepted_tokens + 20
        Played(engines[kind], busy, disturbed=True)
        stats, before = engines[kind].engine.stats(0.0), counted[kind]
        assert stats.preemptions > before.preemptions
        assert stats.prefix_hits > before.prefix_hits
