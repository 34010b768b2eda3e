"""A process whose kopf does not end, ends all the same."""

import asyncio

import pytest
import structlog

from slipway_operator.ending import run_until_stopped
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-17")


def test_a_kopf_that_hangs_after_the_stop_is_left_within_seconds():
    """review/operator-users.md 15: once of three, after two CRDs were deleted, the process lived on without a Lease."""
    codes: list[int] = []

    async def story() -> None:
        left, stopped = asyncio.Event(), asyncio.Event()

        async def kopf() -> None:
            await asyncio.sleep(100)
            stopped.set()
            await asyncio.wait({asyncio.create_task(asyncio.sleep(10**6))})  # waits for a task without a limit

        def leave(code: int) -> None:
            codes.append(code)
            left.set()

        running = asyncio.create_task(run_until_stopped(kopf(), stopped, leave=leave))
        began = asyncio.get_running_loop().time()
        with structlog.testing.capture_logs() as logs:
            await left.wait()
        assert asyncio.get_running_loop().time() - began == pytest.approx(110)
        assert [one["log_level"] for one in logs] == ["error"]
        running.cancel()

    run_in_virtual_time(story())
    assert codes == [1]


@pytest.mark.parametrize("error", [None, ValueError("404")])
def test_a_kopf_that_ends_is_awaited_with_its_error_and_nothing_else_ends_the_process(error):
    codes: list[int] = []

    async def story() -> None:
        stopped = asyncio.Event()

        async def kopf() -> None:
            stopped.set()
            await asyncio.sleep(5)
            if error:
                raise error

        if error:
            with pytest.raises(ValueError, match="404"):
                await run_until_stopped(kopf(), stopped, leave=codes.append)
        else:
            await run_until_stopped(kopf(), stopped, leave=codes.append)
        await asyncio.sleep(60)

    run_in_virtual_time(story())
    assert codes == []
