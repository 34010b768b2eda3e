"""Ends the process when kopf does not end: a task of kopf may swallow the cancellation that should end it.

kopf watches each kind in a task. If one fails (the CRD was deleted: 404), kopf cancels the others and waits for them
without a limit. A watch that is being opened at that moment takes the cancellation for a pause of kopf, and continues.
The process then lives without a Lease, its probes are fine, and nobody leads.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

log = structlog.get_logger()

PATIENCE_SECONDS: Final = 10.0  # kopf itself gives its last tasks 5 s


def leave_at_once(reason: str) -> None:
    """End the process without another await: tasks that still run must not write."""
    log.error("the process ends", reason=reason)
    os._exit(1)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_until_stopped(
    operator: Coroutine[Any, Any, None],
    stopped: asyncio.Event,
    *,
    patience: float = PATIENCE_SECONDS,
    leave: Callable[[int], Any] = os._exit,
) -> None:
    """Run `operator` to its end; if it has not ended `patience` seconds after `stopped` is set, call `leave(1)`.

    By then the passes are finished and the Lease is released, so nothing is lost.
    """
    # Before the operator starts: kopf cancels every task at the end that was created after its start.
    watch = asyncio.create_task(_leave_after(stopped, patience, leave), name="end of the process")
    try:
        await operator
    finally:
        watch.cancel()


async def _leave_after(stopped: asyncio.Event, patience: float, leave: Callable[[int], Any]) -> None:
    await stopped.wait()
    await asyncio.sleep(patience)
    log.error("kopf has not ended in time; the process ends without it", seconds=patience)
    leave(1)
