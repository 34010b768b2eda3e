"""The drain socket: a preStop hook in the agent's own container begins a drain through it, and waits for the end.

Only processes inside the pod can open the socket file, so it needs no token. The request is one JSON line; the answer,
at the end of the drain or at its deadline, is another. Then the drained file is written (`drained_file`).
"""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, Final

import structlog

from slipway_agent.drained_file import DrainedFile
from slipway_agent.refusal import Refusal
from slipway_agent.replica import Replica
from slipway_agent.settings import AgentSettings

log = structlog.get_logger()

SOCKET: Final = "drain.sock"
MOST_LINE_BYTES: Final = 4096
MOST_REFUSE_SECONDS: Final = 3600.0


async def serve_drain_socket(replica: Replica, settings: AgentSettings, file: DrainedFile) -> asyncio.Server | None:
    """Listen; None where the socket cannot be created, as without a run directory on a laptop."""
    path = settings.run_directory / SOCKET

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            raw = await reader.readline()
            asked: dict[str, Any] = json.loads(raw) if raw.strip() else {}
            seconds = min(max(float(asked.get("refuseAfterSeconds", 0)), 0.0), MOST_REFUSE_SECONDS)
            try:
                await replica.drain(refuse_after_seconds=seconds, reason="asked from inside the pod")
            except Refusal as refusal:
                log.warning("drain socket", error=str(refusal))  # it has begun, and cannot be counted yet
            is_drained = True
            try:
                async with asyncio.timeout(settings.drain_timeout_seconds):
                    await replica.drained()
            except TimeoutError:
                is_drained = False
                log.warning("the drain has not ended in time", seconds=settings.drain_timeout_seconds)
            file.write("drained" if is_drained else "the deadline has passed")
            writer.write(json.dumps({"drained": is_drained}).encode() + b"\n")
            await writer.drain()
        except (ValueError, TypeError, AttributeError, ConnectionError) as error:
            log.warning("drain socket", error=type(error).__name__)
        finally:
            writer.close()

    try:
        path.unlink(missing_ok=True)  # left by a killed process
        return await asyncio.start_unix_server(answer, path, limit=MOST_LINE_BYTES)
    except OSError as error:
        log.info("no drain socket", path=str(path), error=error.strerror)
        return None


def ask_for_drain(path: Path, refuse_after_seconds: float) -> bool:
    """Begin a drain and wait for its end or deadline; False where nobody answers. Blocks. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        connection.sendall(json.dumps({"refuseAfterSeconds": refuse_after_seconds}).encode() + b"\n")
        with connection.makefile("rb") as answers:
            return bool(answers.readline(MOST_LINE_BYTES))
