"""Whatever comes in whatever order: everybody ends, nobody's output changes, nothing leaks, no step is too big."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_runtime.messages import FinishReason
from slipway_runtime.scheduling.scheduler import MAX_PREEMPTIONS
from tests.runtime.paper_worker import Play, continuation


@dataclass(frozen=True)
class Arrival:
    after: int  # steps after the one before
    prompt: list[int]
    max_tokens: int
    priority: int
    abort_after: int | None
    deadline_after: int | None
    salt: str


arrivals = st.lists(
    st.builds(
        Arrival,
        after=st.integers(0, 4),
        # Few token values and few lengths: prefixes are shared often.
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        abort_after=st.none() | st.integers(0, 12),
        deadline_after=st.none() | st.integers(1, 25),
        salt=st.sampled_from(["", "", "s"]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.capability("KV-1", "KV-6", "KV-7", "BS-1", "BS-2", "API-3", "PF-5", "PF-10")
@settings(max_examples=250, deadline=None)
@given(
    arrivals=arrivals,
    blocks=st.integers(7, 24),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 12),
)
def test_every_schedule_is_fair_exact_and_within_its_means(arrivals, blocks, block_size, max_num_seqs, extra_budget):
    budget = max_num_seqs + extra_budget
    play = Play(blocks=blocks, block_size=block_size, max_num_seqs=max_num_seqs, budget=budget)
    longest = play.scheduler.max_model_len
    requests: dict[str, Arrival] = {}
    aborts: dict[int, list[str]] = {}
    steps, due = 0, 0
    for index, arrival in enumerate(arrivals):
        if len(arrival.prompt) >= longest:
            continue  # refused at the door
        due += arrival.after
        while steps < due:
            _step(play, aborts, steps, budget, max_num_seqs)
            steps += 1
        name = f"r{index}"
        requests[name] = arrival
        deadline = None if arrival.deadline_after is None else play.now + arrival.deadline_after
        play.add(name, arrival.prompt, arrival.max_tokens, priority=arrival.priority, cache_salt=arrival.salt,
                 deadline=deadline)  # fmt: skip
        if arrival.abort_after is not None:
            aborts.setdefault(steps + arrival.abort_after, []).append(name)

    # Alone and without a cache, everything would take this many steps; recomputation may add as much each time.
    work = sum(len(a.prompt) + a.max_tokens for a in requests.values())
    for _ in range((work + len(requests)) * (1 + MAX_PREEMPTIONS) + 30):
        if not play.scheduler.has_work:
            break
        _step(play, aborts, steps, budget, max_num_seqs)
        steps += 1
    assert not play.scheduler.has_work, "somebody starves"

    for name, arrival in requests.items():
        ends = [o.finish_reason for o in play.outputs[name] if o.finish_reason is not None]
        assert len(ends) == 1, "every request ends once"
        assert play.outputs[name][-1].finish_reason is ends[0], "nothing comes after the end"
        text = play.text(name)
        most = min(arrival.max_tokens, longest - len(arrival.prompt))
        assert text == continuation(arrival.prompt, most)[: len(text)]
        if ends[0] is FinishReason.LENGTH:
            assert len(text) == most
    stats = play.scheduler.stats(0.0)
    assert play.pool.live == 0, "a block leaked"
    assert stats.admitted == stats.finished + stats.aborted == len(requests)
    assert stats.preemptions <= MAX_PREEMPTIONS * len(requests)
    assert stats.generated_tokens == sum(len(play.text(name)) for name in requests)


def _step(play: Play, aborts: dict[int, list[str]], steps: int, budget: int, max_num_seqs: int) -> None:
    for name in aborts.pop(steps, []):
        play.scheduler.abort(name, FinishReason.CANCELLED, play.now)
    play.step()
    assert sum(play.plan.num_new) <= budget, "over budget"
    assert len(play.plan.rows) <= max_num_seqs
    stats = play.scheduler.stats(play.now)
    if stats.running + stats.waiting and play.plan.step:
        assert play.plan.rows or not play.scheduler.has_work or stats.waiting, "work is there and nobody works"


@settings(max_examples=40, deadline=None)
@given(arrivals=arrivals)
def test_the_same_calls_give_the_same_plans(arrivals):
    def plans() -> list[object]:
        play = Play(blocks=20, block_size=2, max_num_seqs=3, budget=6)
        for index, arrival in enumerate(arrivals):
            play.add(f"r{index}", arrival.prompt, arrival.max_tokens, priority=arrival.priority)
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
