"""The drain socket: lets a preStop hook in the same pod start a drain and wait for its end, without a token.

Only processes inside the pod can open the socket file. The request is one JSON line; the answer, at the end of the
drain, is another.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from slipway_runtime.server.replica import Replica

log = structlog.get_logger()


async def serve_control(replica: Replica, directory: Path) -> asyncio.Server | None:
    """Listen on `drain.sock`; None where the socket cannot be created, as without a run directory on a laptop."""
    path = directory / "drain.sock"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            raw = await reader.readline()
            asked: dict[str, Any] = json.loads(raw) if raw.strip() else {}
            seconds = asked.get("timeoutSeconds")
            replica.drain(
                float(seconds) if seconds is not None else None,
                "asked from inside the pod",
                refuse_after_seconds=float(asked.get("refuseAfterSeconds", 0)),
            )
            await replica.drained()
            writer.write(replica.drain_status().wire() + b"\n")
            await writer.drain()
        except (ValueError, ConnectionError) as error:
            log.warning("drain socket", error=type(error).__name__)
        finally:
            writer.close()

    return await _listen(path, answer)


async def _listen(
    path: Path, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server | None:
    try:
        _make_room(path)
        server = await asyncio.start_unix_server(answer, path)
    except OSError as error:
        log.info("no drain socket", path=str(path), error=error.strerror)
        return None
    return server


def _make_room(path: Path) -> None:
    path.unlink(missing_ok=True)  # left by a killed process
