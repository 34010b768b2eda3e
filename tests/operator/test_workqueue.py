"""The work queue: one worker per key, nothing lost, nothing doubled, failures back off."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_operator.controller.queue import QueueClosed, Urgency, WorkQueue
from tests.operator.virtual_time import run_in_virtual_time


def a_queue(jitter: float = 1.0) -> WorkQueue[str]:
    return WorkQueue(uniform=lambda least, most: least + jitter * (most - least))


def clock() -> float:
    return asyncio.get_running_loop().time()


def test_a_burst_for_one_key_is_one_pass():
    async def story() -> None:
        queue = a_queue()
        for _ in range(100):
            queue.add("chat")

        assert len(queue) == 1
        assert await queue.get() == "chat"
        assert len(queue) == 0

    run_in_virtual_time(story())


def test_a_key_added_while_it_is_worked_on_comes_again_after_the_worker_is_done():
    async def story() -> None:
        queue = a_queue()
        queue.add("chat")
        await queue.get()
        queue.add("chat")
        queue.add("chat")

        assert len(queue) == 0, "no second worker may take it"

        queue.done("chat")

        assert len(queue) == 1
        assert await queue.get() == "chat"

    run_in_virtual_time(story())


def test_the_earlier_of_two_wishes_wakes_the_key():
    async def story() -> None:
        queue = a_queue()
        queue.add_after("chat", 60)
        queue.add_after("chat", 5)
        queue.add_after("chat", 30)

        await queue.get()

        assert clock() == pytest.approx(5)

    run_in_virtual_time(story())


def test_taking_a_key_cancels_its_alarm_because_the_pass_will_set_a_new_one():
    async def story() -> None:
        queue = a_queue()
        queue.add_after("chat", 5)
        queue.add("chat")
        await queue.get()
        queue.add_after("chat", 60)
        queue.done("chat")

        await queue.get()

        assert clock() == pytest.approx(60)

    run_in_virtual_time(story())


def test_failures_back_off_exponentially_up_to_a_minute_and_success_resets_them():
    async def story() -> list[float]:
        queue = a_queue()
        delays = []
        for _ in range(10):
            delays.append(queue.retry("chat"))
            await queue.get()
            queue.done("chat")
        queue.forget("chat")
        delays.append(queue.retry("chat"))
        return delays

    delays = run_in_virtual_time(story())

    assert delays == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 0.5])


def test_jitter_shortens_a_retry_by_at_most_half():
    async def story() -> float:
        return a_queue(jitter=0.0).retry("chat")

    assert run_in_virtual_time(story()) == pytest.approx(0.25)


def test_a_closed_queue_gives_what_it_has_and_then_sends_the_workers_home():
    async def story() -> None:
        queue = a_queue()
        queue.add("chat")
        queue.add_after("code", 5)
        queue.close()
        queue.add("late")

        assert await queue.get() == "chat"
        with pytest.raises(QueueClosed):
            await queue.get()

    run_in_virtual_time(story())


def test_closing_wakes_idle_workers():
    async def story() -> None:
        queue = a_queue()
        workers = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(1)
        queue.close()
        results = await asyncio.gather(*workers, return_exceptions=True)

        assert all(isinstance(result, QueueClosed) for result in results)

    run_in_virtual_time(story())


def test_drained_waits_for_active_keys_and_for_those_they_dirtied():
    async def story() -> None:
        queue = a_queue()
        queue.add("chat")
        await queue.get()
        queue.add("chat")
        drained = asyncio.create_task(queue.drained())
        queue.done("chat")
        await asyncio.sleep(1)

        assert not drained.done()

        queue.done(await queue.get())
        await drained

    run_in_virtual_time(story())


def test_a_worker_cancelled_with_a_wake_up_in_its_hand_passes_it_on():
    async def story() -> None:
        queue = a_queue()
        first = asyncio.create_task(queue.get())
        second = asyncio.create_task(queue.get())
        await asyncio.sleep(1)
        queue.add("chat")
        first.cancel()

        async with asyncio.timeout(1):
            assert await second == "chat"

    run_in_virtual_time(story())


def test_an_urgent_key_does_not_wait_behind_a_resync():
    """Capability OP-14: a pod failure is seen to before a thousand keys that a resync queued."""

    async def story() -> None:
        queue = a_queue()
        for number in range(1000):
            queue.add(f"resync-{number}", Urgency.BACKGROUND)
        queue.add("changed")
        queue.add("resync-999", Urgency.URGENT)

        assert [await queue.get() for _ in range(3)] == ["resync-999", "changed", "resync-0"]
        assert len(queue) == 998, "a key is queued once, in its most urgent place"

    run_in_virtual_time(story())


def test_urgent_keys_without_end_starve_no_other():
    async def story() -> None:
        queue = a_queue()
        queue.add("resync", Urgency.BACKGROUND)
        taken = []
        for number in range(20):
            queue.add(f"urgent-{number}", Urgency.URGENT)
            taken.append(await queue.get())
            queue.done(taken[-1])

        assert "resync" in taken

    run_in_virtual_time(story())


def test_a_sample_does_not_wake_a_key_in_backoff_and_a_change_does():
    """Finding 16."""

    async def story() -> None:
        queue = a_queue()
        for _ in range(5):
            queue.retry("chat")
            await queue.get()
            queue.done("chat")
        since = clock()
        queue.add("chat")
        await queue.get()
        queue.add("chat", Urgency.BACKGROUND)
        delay = queue.retry("chat")
        queue.done("chat")
        queue.add("chat", Urgency.BACKGROUND)
        assert len(queue) == 0

        await queue.get()
        assert clock() - since == pytest.approx(delay)

        queue.retry("chat")
        queue.done("chat")
        queue.add("chat", Urgency.URGENT)
        assert len(queue) == 1

    run_in_virtual_time(story())


@settings(max_examples=200, deadline=None)
@given(
    wishes=st.lists(
        st.tuples(st.floats(0, 20), st.sampled_from("abc"), st.sampled_from(["add", "later", "retry"])), max_size=40
    ),
    workers=st.integers(1, 4),
    work_seconds=st.floats(0, 3),
)
def test_every_wish_is_followed_by_a_pass_and_no_key_has_two_workers(wishes, workers, work_seconds):
    """Whatever is added, whenever: a pass for that key begins at or after the wish; passes of a key never overlap."""
    started: list[tuple[float, str]] = []
    wished: list[tuple[float, str]] = []
    active: Counter[str] = Counter()

    async def story() -> None:
        queue = a_queue()

        async def work() -> None:
            while True:
                try:
                    key = await queue.get()
                except QueueClosed:
                    return
                active[key] += 1
                assert active[key] == 1
                started.append((clock(), key))
                await asyncio.sleep(work_seconds)
                active[key] -= 1
                queue.done(key)

        pool = [asyncio.create_task(work()) for _ in range(workers)]
        for at, key, kind in sorted(wishes):
            await asyncio.sleep(at - clock())
            wished.append((clock(), key))
            if kind == "add":
                queue.add(key)
            elif kind == "later":
                queue.add_after(key, 1.5)
            else:
                queue.retry(key)
        await asyncio.sleep(300)
        await queue.drained()
        queue.close()
        await asyncio.gather(*pool)

    run_in_virtual_time(story())

    for at, key in wished:
        assert any(begin >= at and of == key for begin, of in started)
    assert len(started) <= len(wished)
