"""Standby (warm pool): a process with a loaded model waits until POST /model claims it for a service.

| --standby | while the process waits                             | on the claim                               |
|-----------|-----------------------------------------------------|--------------------------------------------|
| loaded    | weights and KV cache are on the device              | name, tokens and warm prompts are set      |
| sleeping  | the weights are in host memory, no KV cache is kept | weights are copied back, then as above     |
"""

import asyncio
import time
from typing import Final

import structlog

from slipway_runtime.engine.client import EngineClient, EngineDead
from slipway_runtime.messages import Sleep, WakeUp
from slipway_runtime.server.model_choice import ModelChoice
from slipway_runtime.server.replica import Replica
from slipway_runtime.settings import RuntimeSettings

log = structlog.get_logger()

HOST_MEMORY: Final = 1  # the level of sleep that keeps the weights


class StandbyError(Exception):
    """The engine could not free its memory, or could not allocate it again."""


async def stand_by(
    settings: RuntimeSettings, choice: ModelChoice, replica: Replica, client: EngineClient
) -> RuntimeSettings | None:
    """Wait for the claim; returns its settings, or None where the engine died. Raises StandbyError."""
    sleeps = settings.standby == "sleeping" and not choice.is_claimed
    claim = asyncio.create_task(choice.claimed())
    death = asyncio.create_task(client.wait_dead())
    try:
        if sleeps:
            await _ask(client, Sleep(call=0, level=HOST_MEMORY))
        if not choice.is_claimed:
            replica.standing_by()
            log.info("standing by", level=settings.standby)
        await asyncio.wait({claim, death}, return_when=asyncio.FIRST_COMPLETED)
        if not claim.done():
            return None
        began = time.monotonic()
        if sleeps:
            await _ask(client, WakeUp(call=0))
        log.info("claimed", model=claim.result().model_name, wake_seconds=round(time.monotonic() - began, 3))
        return claim.result()
    except EngineDead:
        return None
    finally:
        claim.cancel()
        death.cancel()


async def _ask(client: EngineClient, message: Sleep | WakeUp) -> None:
    reply = await client.call(message)
    if reply.error:
        raise StandbyError(reply.error)
