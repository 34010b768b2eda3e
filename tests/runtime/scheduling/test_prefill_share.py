"""Long prompts beside short ones: bounds in steps for both, and no token of a step unused."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from slipway_runtime.messages import FinishReason
from slipway_runtime.scheduling.sequence import Sequence, State
from tests.runtime.paper_worker import Play, continuation

LONG = 10_000
CHAT = 50
BUDGET = 512


def a_play(**options: object) -> Play:
    """Blocks for all prompts of a story."""
    return Play(**{"blocks": 1000, "block_size": 64, "max_num_seqs": 16, "budget": BUDGET, **options})


def tokens(seed: int, length: int) -> list[int]:
    """A prompt that shares no prefix with those of other seeds."""
    return [1000 + seed, *(n % 40 for n in range(length - 1))]


def steps_until_answered(play: Play, *names: str, most: int = 1000) -> int:
    for steps in range(1, most + 1):
        play.step()
        if all(name in play.outputs for name in names):
            return steps
    raise AssertionError(f"no first token of {names} in {most} steps")


# --- stories


@pytest.mark.capability("PF-28", "BS-2")
def test_chats_behind_a_prompt_of_50_000_tokens_are_answered_in_the_next_step():
    play = a_play()
    play.add("long", tokens(0, 50_000), max_tokens=1)
    play.step()
    for index in range(5):
        play.add(f"chat{index}", tokens(index + 1, CHAT), max_tokens=1)

    assert steps_until_answered(play, *(f"chat{index}" for index in range(5))) == 1


@pytest.mark.capability("PF-28")
def test_a_chat_that_arrives_with_a_long_prompt_waits_one_step():
    play = a_play()
    play.add("long", tokens(0, LONG), max_tokens=1)
    play.add("chat", tokens(1, CHAT), max_tokens=1)

    assert steps_until_answered(play, "chat") == 2


@pytest.mark.capability("PF-28")
def test_a_chat_behind_several_long_prompts_waits_one_step_for_each():
    play = a_play()
    for index in range(4):
        play.add(f"long{index}", tokens(index, LONG), max_tokens=1)
    play.add("chat", tokens(9, CHAT), max_tokens=1)

    assert steps_until_answered(play, "chat") == 5
    play.run(2000)
    ends = [play.outputs[f"long{index}"][0].first_token_at for index in range(4)]
    assert ends == sorted(ends), "long prompts are computed in their order"


@pytest.mark.capability("PF-28", "PF-5")
def test_a_long_prompt_takes_at_most_twice_its_steps_in_a_flood_of_chats():
    alone = a_play()
    alone.add("long", tokens(0, LONG), max_tokens=1)
    beside = a_play(max_num_seqs=64)
    beside.add("long", tokens(0, LONG), max_tokens=1)
    numbers = count(1)
    steps = 0
    while "long" not in beside.outputs and steps < 100:
        while len(beside.scheduler._table.waiting) < 20:  # more chats than a step holds
            beside.add(f"chat{next(numbers)}", tokens(7, CHAT), max_tokens=1, cache_salt=str(steps))
        beside.step()
        steps += 1
        assert sum(beside.plan.num_new) == BUDGET, "each step is full"

    assert steps_until_answered(alone, "long") == -(-LONG // BUDGET)
    assert steps <= 1 + -(-LONG // (BUDGET // 2))
    assert sum(name.startswith("chat") for name in beside.outputs) > 180, "the other half went to chats"
    assert beside.text("long") == continuation(tokens(0, LONG), 1)


@pytest.mark.capability("PF-28")
def test_a_long_prompt_whose_prefix_is_cached_is_a_short_one():
    play = a_play()
    history = tokens(3, 4000)
    play.add("turn-1", history, max_tokens=1)
    play.run(2000)
    play.add("long", tokens(0, LONG), max_tokens=1)
    play.step()
    play.add("turn-2", [*history, *range(1, CHAT)], max_tokens=1)

    assert steps_until_answered(play, "turn-2") == 1


@pytest.mark.capability("PF-28", "BS-5")
@pytest.mark.parametrize("others", [0, 1])
def test_a_lower_priority_takes_nothing_from_a_long_prompt(others):
    play = a_play(aging_seconds=1000.0)
    play.add("long", tokens(0, LONG), max_tokens=1, priority=1)
    play.step()
    for index in range(12):
        play.add(f"chat{index}", tokens(index + 1, 200), max_tokens=1, priority=others)
    steps = 1 + steps_until_answered(play, "long")

    alone = -(-LONG // BUDGET)
    assert steps == (alone if others == 0 else alone + -(-12 * 200 // BUDGET))


@pytest.mark.capability("PF-28")
def test_what_a_long_prompt_leaves_of_its_last_step_goes_to_a_lower_priority():
    play = a_play()
    play.add("long", tokens(0, BUDGET + 400), max_tokens=1, priority=1)
    play.step()
    play.add("chat", tokens(1, CHAT), max_tokens=1)

    assert steps_until_answered(play, "long", "chat") == 1


@pytest.mark.capability("PF-28", "BS-5")
def test_a_lower_priority_gets_its_share_beside_a_long_prompt_when_it_has_aged():
    play = a_play(aging_seconds=20.0)  # a step is a second
    play.add("long", tokens(0, LONG), max_tokens=1, priority=1)
    play.step()
    play.add("chat", tokens(1, CHAT), max_tokens=1)

    assert steps_until_answered(play, "chat") == pytest.approx(20, abs=1)


@pytest.mark.capability("PF-28", "BS-5")
def test_a_chat_of_higher_priority_does_not_wait_for_a_long_prompt_of_a_lower_one():
    play = a_play()
    play.add("long", tokens(0, LONG), max_tokens=1)
    play.step()
    play.add("chat", tokens(1, CHAT), max_tokens=1, priority=2)

    assert steps_until_answered(play, "chat") == 1


@pytest.mark.capability("PF-28", "PF-5")
def test_a_long_prompt_is_computed_beside_a_stream_of_long_ones_of_higher_priority():
    play = a_play(blocks=4000)
    play.add("long", tokens(0, 10_000), max_tokens=1)
    play.step()
    numbers = count(1)
    steps = 1
    while "long" not in play.outputs and steps < 100:
        if not len(play.scheduler._table.waiting):
            number = next(numbers)
            play.add(f"important{number}", tokens(number, 10_000), max_tokens=1, priority=1)
        play.step()
        steps += 1

    assert steps <= 1 + -(-10_000 // (BUDGET // 2))


@pytest.mark.capability("PF-28")
def test_a_prompt_is_long_while_more_than_half_of_a_step_is_left_of_it():
    play = a_play()
    play.add("first", tokens(0, BUDGET + 400), max_tokens=1)
    play.step()
    for index in range(5):
        play.add(f"chat{index}", tokens(index + 1, 51), max_tokens=1)

    assert steps_until_answered(play, *(f"chat{index}" for index in range(5))) == 1


def test_a_paused_long_prompt_reserves_nothing():
    play = a_play()
    play.add("long", tokens(0, LONG), max_tokens=1)
    play.step()
    play.pause("long")
    play.add("mid", tokens(1, 2 * BUDGET), max_tokens=1)

    assert steps_until_answered(play, "mid") == 2


def test_a_paused_sequence_makes_way_for_a_chat_beside_a_long_prompt():
    play = a_play(max_num_seqs=2)
    play.add("idle", tokens(1, CHAT), max_tokens=90)
    play.add("long", tokens(0, LONG), max_tokens=1)
    play.step()
    play.pause("idle")
    play.add("chat", tokens(2, CHAT), max_tokens=1)

    assert steps_until_answered(play, "chat") <= 3


# --- bounds for any traffic of one priority, with rows and blocks for all

prompts = st.lists(
    st.tuples(st.integers(0, 6), st.one_of(st.integers(1, 8), st.integers(20, 200)), st.integers(1, 6)),
    min_size=1,
    max_size=10,
)


@pytest.mark.capability("PF-28", "PF-5")
@settings(max_examples=60, deadline=None)
@given(prompts=prompts, budget=st.integers(16, 40), overlap=st.booleans())
def test_every_prompt_is_computed_within_its_bound(prompts, budget, overlap):
    """The bounds of prefill_share.py, for (steps after the one before, length of the prompt, tokens of output)."""
    rows = 15
    play = Play(blocks=4000, block_size=4, max_num_seqs=rows, budget=budget, overlap=overlap)
    added: dict[str, int] = {}
    for index, (after, length, max_tokens) in enumerate(prompts):
        for _ in range(after):
            if play.scheduler.has_work:
                play.step()
        play.add(f"r{index}", tokens(index, length), max_tokens=max_tokens)
        added[f"r{index}"] = len(play.all_plans)
    play.run(2000)

    left = budget - (len(prompts) - 1)  # tokens of a step for prompts, if all others decode
    reserve, share, most_short = left // 2, left - left // 2, budget // 2
    before_short = before_long = longs = 0
    for index, (_, length, _) in enumerate(prompts):
        if 2 * length > budget:
            before_long, longs = before_long + length, longs + 1
            # All long prompts before it, and it, at the reserve: twice what they take without short ones.
            bound = -(-before_long // reserve) + -(-(before_short + longs * most_short) // share) + longs
        else:
            before_short += length
            bound = -(-(before_short + longs * most_short) // share) + longs
        computed = _step_of_first_token(play, f"r{index}")
        assert computed - added[f"r{index}"] <= bound + overlap


def _step_of_first_token(play: Play, name: str) -> int:
    row_of = {}
    for step, plan in enumerate(play.all_plans, 1):
        for new in plan.new_rows:
            row_of[new.row] = new.request_id
        for row, samples in zip(plan.rows, plan.samples, strict=True):
            if samples and row_of[row] == name:
                return step
    raise AssertionError(f"{name} has no first token")


# --- what holds in each step, whatever comes: also priorities, aborts, pauses and preemption


class LongAndShortPrompts(RuleBasedStateMachine):
    """Any traffic on a scheduler with few blocks; each step is checked against the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count()
        self.live: list[str] = []

    @initialize(blocks=st.integers(60, 300), rows=st.integers(2, 6), extra=st.integers(0, 30), overlap=st.booleans())
    def begin(self, blocks: int, rows: int, extra: int, overlap: bool) -> None:
        self.budget, self.rows = rows + extra, rows
        self.play = Play(
            blocks=blocks, block_size=4, max_num_seqs=rows, budget=self.budget, aging_seconds=5.0, overlap=overlap
        )
        schedule = self.play.scheduler.schedule

        def checked(now: float) -> object:
            return self.check_step(schedule, now)

        self.play.scheduler.schedule = checked

    @rule(length=st.one_of(st.integers(1, 12), st.integers(40, 160)), output=st.integers(1, 8),
          priority=st.integers(0, 1), tenant=st.sampled_from(["", "a"]))  # fmt: skip
    def arrive(self, length: int, output: int, priority: int, tenant: str) -> None:
        number = next(self.numbers)
        self.live.append(f"r{number}")
        self.play.add(f"r{number}", tokens(number, length), max_tokens=output, priority=priority, tenant=tenant)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.play.abort(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), on=st.booleans())
    def pause(self, data: st.DataObject, on: bool) -> None:
        self.play.pause(data.draw(st.sampled_from(self.live)), on)

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.play.scheduler.has_work:
                self.play.step()

    def check_step(self, schedule, now: float) -> object:
        table = self.play.scheduler._table
        preemptions = table.counters.preemptions
        ahead = {sequence: sequence.num_ahead for sequence in table.running}
        plan = schedule(now)
        if table.counters.preemptions > preemptions or any(sequence.state is not State.RUNNING for sequence in ahead):
            return plan  # preempted, or at its deadline
        given = dict(zip(plan.rows, plan.num_new, strict=True))
        left = self.budget - sum(1 for tokens in ahead.values() if tokens == 1)
        longs = [sequence for sequence, tokens in ahead.items() if 2 * tokens > self.budget and tokens > 1]
        self.check_full(sum(plan.num_new), list(table.running))
        if longs:
            first = min(longs, key=lambda sequence: (sequence.scheduled_at, sequence.serial))
            assert given.get(first.row, 0) >= left // 2, "the first long prompt has its reserve"
            waits = [s for s, tokens in ahead.items() if s not in longs and tokens > 1 and s.num_ahead > 1]
            to_others = sum(tokens for row, tokens in given.items() if row != first.row) - (self.budget - left)
            if waits:
                assert left > 1
                assert to_others >= left - left // 2, "half of the step is for short prompts while they have work"
        return plan

    def check_full(self, planned: int, running: list[Sequence]) -> None:
        assert planned <= self.budget
        if planned < self.budget:
            unplanned = [s for s in running if s.num_ahead > 1 or (s.num_ahead == 1 and not s.num_pending)]
            assert not unplanned, "tokens of the step are unused while a prompt waits for them"

    def teardown(self) -> None:
        if not hasattr(self, "play"):
            return
        for name in self.live:
            self.play.pause(name, False)
        self.play.run(2000)
        ends = {name: [o.finish_reason for o in self.play.outputs[name] if o.finish_reason] for name in self.live}
        assert all(reasons in ([FinishReason.LENGTH], [FinishReason.CANCELLED]) for reasons in ends.values())
        assert self.play.pool.live == 0


TestLongAndShortPrompts = pytest.mark.capability("PF-28", "PF-5")(LongAndShortPrompts.TestCase)
TestLongAndShortPrompts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
