"""No service uses up what it shares with others: slots go round, and a silent port holds up no worker."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_operator.controller.isolation import BackgroundCalls, FairSlots
from tests.operator.virtual_time import run_in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.capability("OP-14")
def test_a_thousand_calls_of_one_owner_delay_another_by_nothing():
    async def story() -> None:
        slots: FairSlots[str] = FairSlots(total=64, per_owner=8)

        async def call(owner: str, seconds: float) -> float:
            async with slots.hold(owner):
                began = now()
                await asyncio.sleep(seconds)
                return began

        greedy = [asyncio.create_task(call("greedy", 2.0)) for _ in range(1000)]
        await asyncio.sleep(1)
        modest = await asyncio.gather(*(call("modest", 0.01) for _ in range(8)))

        assert modest == [1.0] * 8
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        assert await call("greedy", 0) == now()

    run_in_virtual_time(story())


def test_owners_that_fill_all_slots_are_served_in_turn():
    async def story() -> list[str]:
        slots: FairSlots[str] = FairSlots(total=1, per_owner=1)
        served: list[str] = []

        async def call(owner: str) -> None:
            async with slots.hold(owner):
                served.append(owner)
                await asyncio.sleep(1)

        await asyncio.gather(*(call(owner) for owner in "aaaabbc"))
        return served

    assert "".join(run_in_virtual_time(story())) == "aabcaba"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5), st.booleans()), max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_bounds_hold_and_no_slot_is_lost_whatever_is_cancelled(calls, total, per_owner):
    async def story() -> None:
        slots: FairSlots[str] = FairSlots(total=total, per_owner=per_owner)
        held: Counter[str] = Counter()

        async def call(owner: str, seconds: float) -> None:
            async with slots.hold(owner):
                held[owner] += 1
                assert held[owner] <= per_owner
                assert held.total() <= total
                try:
                    await asyncio.sleep(seconds)
                finally:
                    held[owner] -= 1

        tasks = [(asyncio.create_task(call(owner, seconds)), is_cut) for owner, seconds, is_cut in calls]
        await asyncio.sleep(2)
        for task, is_cut in tasks:
            if is_cut:
                task.cancel()
        results = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert not [one for one in results if isinstance(one, AssertionError)]
        async with asyncio.timeout(0.1):
            for owner in "abc":
                await call(owner, 0)

    run_in_virtual_time(story())


def test_a_background_call_runs_once_for_each_subject_and_its_success_is_told():
    async def story() -> None:
        done: list[tuple[str, str]] = []
        calls: BackgroundCalls[str] = BackgroundCalls(
            FairSlots(total=8, per_owner=2), lambda owner, subject: done.append((owner, subject))
        )
        began: list[str] = []

        async def drain(uid: str) -> None:
            began.append(uid)
            await asyncio.sleep(1)
            if uid == "silent":
                raise ConnectionError

        for _ in range(3):
            calls.start("chat", "uid-1", lambda: drain("uid-1"))
            calls.start("chat", "silent", lambda: drain("silent"))
        assert began == [], "nobody waits for them"
        await asyncio.sleep(1.5)

        assert sorted(began) == ["silent", "uid-1"]
        assert done == [("chat", "uid-1")]
        assert len(calls) == 0

        calls.start("chat", "silent", lambda: drain("silent"))
        await calls.stop()
        assert len(calls) == 0

    run_in_virtual_time(story())
