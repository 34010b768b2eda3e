"""Whatever comes in whatever order: everybody ends, nobody's output changes, nothing leaks, no step is too big."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_runtime.messages import FinishReason
from slipway_runtime.scheduling.prefix_cache import MAX_PREEMPTIONS
from tests.runtime.paper_worker import PaperDraft, Play, continuation

LOADED = ("sha256:a", "sha256:b", "sha256:c")
ADAPTERS = ("", "", *LOADED)


@dataclass(frozen=True)
class Arrival:
    after: int  # steps after the one before
    prompt: list[int]
    max_tokens: int
    priority: int
    abort_after: int | None
    abort_index: int | None
    deadline_after: int | None
    pause_after: int | None
    pause_for: int
    salt: str
    tenant: str
    adapter: str
    n: int
    scored: bool


@dataclass(frozen=True)
class Stage:
    blocks: int
    block_size: int
    max_num_seqs: int
    extra_budget: int
    overlap: bool
    drafted: int
    memory: int | None
    slots: int
    in_memory: int
    block_bytes: int
    host_blocks: int
    host_enough: int
    draft: tuple[int | None, int, int, int] | None  # where it goes wrong, blocks, budget, longest; None: no draft model

    def play(self, **changes: object) -> Play:
        return Play(
            blocks=self.blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            budget=self.max_num_seqs + self.extra_budget,
            memory=self.memory,
            **{
                "overlap": self.overlap,
                "speculation_max_tokens": self.drafted,
                "residency": {
                    "max_adapters": self.slots,
                    "max_cpu_adapters": self.in_memory,
                    "block_bytes": self.block_bytes,
                    "most_blocks": 3,
                },
                "adapter_bytes": 100,
                "tenant_weights": {"big": 3.0},
                "kv_events": True,
                "host_blocks": self.host_blocks,
                "host_enough": self.host_enough,
                **self._with_draft_model(),
                **changes,
            },
        )

    def _with_draft_model(self) -> dict[str, object]:
        if self.draft is None:
            return {}
        wrong_after, blocks, budget, longest = self.draft
        return {
            "draft": PaperDraft(self.block_size, self.memory, wrong_after=wrong_after, fails=(3, 9)),
            "draft_blocks": blocks,
            "draft_budget": budget,
            "draft_max_model_len": longest,
        }


arrivals = st.lists(
    st.builds(
        Arrival,
        after=st.integers(0, 4),
        # Few token values and few lengths: prefixes are shared often.
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        abort_after=st.none() | st.integers(0, 12),
        abort_index=st.none() | st.integers(0, 2),
        deadline_after=st.none() | st.integers(1, 25),
        pause_after=st.none() | st.integers(0, 8),
        pause_for=st.integers(1, 20),
        salt=st.sampled_from(["", "", "s"]),
        tenant=st.sampled_from(["", "big", "small"]),
        adapter=st.sampled_from(ADAPTERS),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        scored=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
stages = st.builds(
    Stage,
    blocks=st.integers(10, 24),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 12),
    overlap=st.booleans(),
    drafted=st.sampled_from([0, 0, 2, 5]),
    memory=st.sampled_from([None, 1, 2]),
    slots=st.integers(1, 3),
    in_memory=st.integers(1, 3),
    block_bytes=st.sampled_from([0, 50, 100]),
    host_blocks=st.sampled_from([0, 1, 5, 40]),
    host_enough=st.sampled_from([1, 256]),
    draft=st.none(),
)
# Between the steps: an adapter is unloaded and comes back, or nobody may find a prefix any more.
disturbances = st.dictionaries(st.integers(0, 30), st.sampled_from([*LOADED, "forget"]), max_size=4)


# Few long prompts that come again and again, for a pool that holds two of them.
returning = st.lists(
    st.builds(
        Arrival,
        after=st.integers(0, 9),
        prompt=st.builds(
            lambda which, length, end: [which + 1, *range(2, length), end],
            st.integers(0, 3), st.integers(6, 13), st.integers(1, 2),
        ),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 1),
        abort_after=st.none(),
        abort_index=st.none(),
        deadline_after=st.none() | st.integers(5, 25),
        pause_after=st.none(),
        pause_for=st.just(1),
        salt=st.just(""),
        tenant=st.just(""),
        adapter=st.sampled_from(["", "", "", LOADED[0]]),
        n=st.sampled_from([1, 1, 1, 2]),
        scored=st.just(False),
    ),
    min_size=6,
    max_size=16,
)  # fmt: skip
crowded = st.builds(
    Stage,
    blocks=st.integers(11, 16),
    block_size=st.sampled_from([1, 2]),
    max_num_seqs=st.integers(1, 4),
    extra_budget=st.integers(2, 16),
    overlap=st.booleans(),
    drafted=st.sampled_from([0, 0, 3]),
    memory=st.sampled_from([None, 1]),
    slots=st.integers(1, 2),
    in_memory=st.integers(1, 2),
    block_bytes=st.sampled_from([0, 100]),
    host_blocks=st.integers(1, 40),
    host_enough=st.sampled_from([1, 256]),
    draft=st.none(),
)


@pytest.mark.capability("KV-1", "KV-3", "KV-6", "KV-7", "BS-1", "BS-2", "API-3", "API-10")
@pytest.mark.capability("ML-5", "ML-6", "PF-5", "PF-10", "PF-25")
@settings(max_examples=150, deadline=None)
@given(arrivals=arrivals, stage=stages, disturbances=disturbances)
def test_every_schedule_is_fair_exact_and_within_its_means(arrivals, stage, disturbances):
    _play_to_the_end(arrivals, stage, disturbances)


# Draft models that are right, right at first or always wrong, with too few blocks for all rows, and too short for some.
drafting = stages.flatmap(
    lambda stage: st.builds(
        replace,
        st.just(stage),
        overlap=st.booleans(),
        drafted=st.sampled_from([1, 3, 5]),
        draft=st.tuples(
            st.sampled_from([None, None, 0, 1, 2]),
            st.integers(3, 30),
            st.sampled_from([1, 3, 16]),
            st.sampled_from([9, 100_000]),
        ),
    )
)


@pytest.mark.capability("SD-4", "SD-1", "PF-21")
@settings(max_examples=150, deadline=None)
@given(arrivals=arrivals, stage=drafting, disturbances=disturbances)
def test_a_draft_model_changes_no_answer_and_returns_its_blocks(arrivals, stage, disturbances):
    play = _play_to_the_end(arrivals, stage, disturbances)
    assert play.draft_model.pool.live == 0
    assert play.draft.widest <= max(stage.draft[2], stage.max_num_seqs)


@pytest.mark.capability("KV-12", "KV-3")
@settings(max_examples=80, deadline=None)
@given(arrivals=returning, stage=crowded, disturbances=disturbances)
def test_what_comes_back_from_host_memory_is_what_would_have_been_computed(arrivals, stage, disturbances):
    _play_to_the_end(arrivals, stage, disturbances)


def _play_to_the_end(arrivals: list[Arrival], stage: Stage, disturbances: dict[int, str]) -> Play:
    """Every token that is read on the way is checked by the worker, the table after every step."""
    play = stage.play()
    for adapter in LOADED:
        play.load(adapter)
    longest = play.scheduler.max_model_len
    requests: dict[str, Arrival] = {}
    aborts: dict[int, list[tuple[str, int | None]]] = {}
    pauses: dict[int, list[tuple[str, bool]]] = {}
    steps, due = 0, 0
    for index, arrival in enumerate(arrivals):
        if len(arrival.prompt) >= longest:
            continue  # refused before it is queued
        due += arrival.after
        while steps < due:
            _step(play, stage, aborts, pauses, disturbances, steps)
            steps += 1
        name = f"r{index}"
        requests[name] = arrival
        add(play, name, arrival)
        if arrival.abort_after is not None:
            aborts.setdefault(steps + arrival.abort_after, []).append((name, arrival.abort_index))
        if arrival.pause_after is not None:
            pauses.setdefault(steps + arrival.pause_after, []).append((name, True))
            pauses.setdefault(steps + arrival.pause_after + arrival.pause_for, []).append((name, False))

    # Alone and without a cache, everything would take this many steps; recomputation may add as much each time.
    work = sum((len(a.prompt) + a.max_tokens) * a.n for a in requests.values())
    count = sum(a.n for a in requests.values())
    paused = sum(a.n for a in requests.values() if a.pause_after is not None)
    for _ in range((work + 40 * count) * (1 + MAX_PREEMPTIONS + bool(paused)) + 60):
        if not play.scheduler.has_work and not pauses:
            break
        _step(play, stage, aborts, pauses, disturbances, steps)
        steps += 1
    assert not play.scheduler.has_work, "somebody starves"

    for name, arrival in requests.items():
        for index in range(arrival.n):
            _ended_as_promised(play, stage, name, arrival, index)
    stats = play.scheduler.stats(0.0)
    assert play.pool.live == 0, "a block leaked"
    assert stats.admitted == stats.finished + stats.aborted == count
    assert stats.preemptions <= MAX_PREEMPTIONS * count + paused
    assert stats.generated_tokens == sum(len(o.token_ids) for outputs in play.outputs.values() for o in outputs)
    assert stats.prompt_tokens == sum(len(a.prompt) for a in requests.values()), "n answers share one prompt"
    assert stats.accepted_tokens <= stats.draft_tokens
    assert stats.invalid_kv_blocks == 0
    return play


def add(play: Play, name: str, arrival: Arrival, **fields: object) -> None:
    deadline = None if arrival.deadline_after is None else play.now + arrival.deadline_after
    play.add(
        name,
        arrival.prompt,
        arrival.max_tokens,
        **{
            "priority": arrival.priority,
            "cache_salt": arrival.salt,
            "deadline": deadline,
            "tenant": arrival.tenant,
            "adapter": arrival.adapter,
            "n": arrival.n,
            "prompt_logprobs": 1 if arrival.scored else None,
            **fields,
        },
    )


def _ended_as_promised(play: Play, stage: Stage, name: str, arrival: Arrival, index: int) -> None:
    outputs = [output for output in play.outputs[name] if output.index == index]
    ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
    assert len(ends) == 1, "every answer ends once"
    assert outputs[-1].finish_reason is ends[0], "nothing comes after the end"
    text = play.text(name, index)
    most = min(arrival.max_tokens, play.scheduler.max_model_len - len(arrival.prompt))
    assert text == continuation(arrival.prompt, most, arrival.adapter, index, stage.memory)[: len(text)]
    if ends[0] is FinishReason.LENGTH:
        assert len(text) == most
    if ends[0] is FinishReason.ERROR:
        assert outputs[-1].error
    if arrival.scored and text and index == 0:
        first, *others = outputs[0].prompt_logprobs
        assert first is None
        assert [scored.token_id for scored in others] == arrival.prompt[1:]
        assert outputs[0].cached_tokens == 0, "who wants the prompt scored reads no cache"
    assert all(output.prompt_logprobs is None for output in outputs[1 if index == 0 else 0 :])


def _step(
    play: Play,
    stage: Stage,
    aborts: dict[int, list[tuple[str, int | None]]],
    pauses: dict[int, list[tuple[str, bool]]],
    disturbances: dict[int, str],
    steps: int,
) -> None:
    for name, on in pauses.pop(steps, []):
        play.pause(name, on)
    for name, index in aborts.pop(steps, []):
        play.abort(name, index)
    what = disturbances.get(steps)
    if what == "forget":
        play.scheduler.forget_prefixes()
        assert play.pool.cached == 0
        assert play.tier is None or play.tier.held == 0
    elif what is not None:
        play.scheduler.unload_adapter(what, play.now)
    elif disturbances.get(steps - 3) is not None:
        for adapter in LOADED:
            play.load(adapter)
    play.step()
    assert sum(play.plan.num_new) <= stage.max_num_seqs + stage.extra_budget, "over budget"
    assert len(play.plan.rows) <= stage.max_num_seqs
    assert play.scheduler.stats(play.now).invalid_kv_blocks == 0


@pytest.mark.capability("BS-7", "PF-10")
@settings(max_examples=70, deadline=None)
@given(arrivals=arrivals, stage=stages, eos=st.sampled_from([(), (3,), (1, 4, 9, 16, 25)]))
def test_with_two_plans_in_flight_everybody_gets_the_same_answer(arrivals, stage, eos):
    def texts(overlap: bool, drafted: int, **changes: int) -> dict[tuple[str, int], tuple[object, ...]]:
        play = stage.play(overlap=overlap, speculation_max_tokens=drafted, eos=eos, **changes)
        for adapter in LOADED:
            play.load(adapter)
        for index, arrival in enumerate(arrivals):
            if len(arrival.prompt) < play.scheduler.max_model_len:
                add(play, f"r{index}", arrival, deadline=None)
            for _ in range(arrival.after):
                play.step()
        play.run()
        assert play.pool.live == 0
        return {
            (name, o.index): (play.text(name, o.index), o.finish_reason, o.stop_token_id)
            for name, outputs in play.outputs.items()
            for o in outputs
            if o.finish_reason is not None
        }

    plain = texts(overlap=False, drafted=0, host_blocks=0)
    assert plain == texts(overlap=True, drafted=0) == texts(overlap=False, drafted=4)
    assert plain == texts(overlap=True, drafted=0, host_blocks=7, host_enough=3)


@settings(max_examples=40, deadline=None)
@given(arrivals=arrivals, stage=stages)
def test_the_same_calls_give_the_same_plans(arrivals, stage):
    def plans() -> list[object]:
        play = stage.play()
        for adapter in LOADED:
            play.load(adapter)
        for index, arrival in enumerate(arrivals):
            if len(arrival.prompt) < play.scheduler.max_model_len:
                add(play, f"r{index}", arrival)
        seen = []
        while play.scheduler.has_work:
            play.step()
            seen.append(play.plan)
        return seen

    assert plans() == plans()


@pytest.mark.capability("BS-1")
def test_within_a_priority_who_came_first_starts_first():
    play = Play(blocks=6, block_size=2, max_num_seqs=2, budget=8)
    play.add("big", [1] * 9, max_tokens=1)
    play.add("running", [2], max_tokens=6)
    for index in range(5):
        play.add(f"small{index}", [3], max_tokens=1)
    play.run()
    starts = {name: outputs[0].scheduled_at for name, outputs in play.outputs.items()}
    assert list(starts.values()) == sorted(starts.values())
    assert min(starts, key=starts.get) == "big", "small ones do not overtake a big one for ever"
