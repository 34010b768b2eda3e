"""Hedged requests: asks a second replica too when the first one is late with its first token (`spec.routing.hedging`).

1. A streamed request with a short prompt has waited for its first byte for longer than 95 % of such requests of its
   service did: the same request, with the same seed, goes to a second replica of the same revision.
2. The first one that answers is forwarded. The other one is cancelled: its connection is closed, upon which its engine
   aborts the request before its next step. Nothing of it was sent to anybody.
3. A second replica that fails or refuses changes nothing; where the first one fails meanwhile, the second one decides.

A hedge spends one retry of its service's budget. By the percentile alone, 5 % of such requests are hedged.
"""

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from slipway_gateway.attempts import Opened
from slipway_gateway.upstream import UpstreamError

Opening = Coroutine[Any, Any, Opened]


class HedgeOutcome(Enum):
    """How a hedge ended."""

    WON = "won"  # the second replica answered first
    LOST = "lost"  # the first one did
    FAILED = "failed"  # the second one failed or refused
    DENIED = "denied"  # it was not sent: the budget is spent


async def first_answer(
    first: Opening, delay: float, start_second: Callable[[], Opening | None]
) -> tuple[Opened, HedgeOutcome | None, UpstreamError | None]:
    """The first answer of two replicas, how the hedge ended, and the error of the attempt that nobody hears of.

    `start_second` is called after `delay` seconds without an answer; None: there is no second replica. Raises what the
    first one raised, where the second one does not answer.
    """
    tasks = [asyncio.create_task(first)]
    winner: Opened | None = None
    try:
        await asyncio.wait(tasks, timeout=delay)
        second = None if tasks[0].done() else start_second()
        if second is None:
            winner = await tasks[0]
            return winner, None, None
        tasks.append(asyncio.create_task(second))
        winner, outcome, error = await _race(*tasks)
        return winner, outcome, error
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Opened) and ended is not winner:
                await ended.drop()


async def _race(
    first: asyncio.Task[Opened], second: asyncio.Task[Opened]
) -> tuple[Opened, HedgeOutcome, UpstreamError | None]:
    await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    if first.done() and _has_answered(first):
        return first.result(), HedgeOutcome.LOST, None
    await asyncio.wait((second,))  # the first one has failed or refused, or the second one is done
    if _has_answered(second):
        return second.result(), HedgeOutcome.WON, _error_of(first) if first.done() else None
    return await first, HedgeOutcome.FAILED, _error_of(second)


def _has_answered(task: asyncio.Task[Opened]) -> bool:
    return task.exception() is None and task.result().is_stream


def _error_of(task: asyncio.Task[Opened]) -> UpstreamError | None:
    error = task.exception()
    return error if isinstance(error, UpstreamError) else None
