"""`slipway-runtime serve` as a process of its own, and what a test holds it by.

A process costs seconds of imports before it does anything. Where a promise is not one about processes, `serving_here`
runs the same `serve` on the loop of the test, with its engine on a thread.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from slipway_api.admin_token import token_digest
from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.serve import serve
from tests.runtime.gateway_token import GATEWAY_TOKEN

TINY = Path(__file__).parents[2] / "models" / "tiny"
RUNTIME = [sys.executable, "-m", "slipway_runtime.main"]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "SLIPWAY_GATEWAY_TOKEN_SHA256": token_digest(GATEWAY_TOKEN),
}


@dataclass
class Replica:
    """A running replica and what it has logged so far."""

    run_directory: Path
    log: list[dict[str, Any]] = field(default_factory=list)

    def is_over(self) -> bool:
        raise NotImplementedError

    async def ended(self) -> int:
        """The exit code."""
        raise NotImplementedError

    def terminate(self) -> None:
        """What the kubelet does."""
        raise NotImplementedError

    async def logged(self, message: str) -> dict[str, Any]:
        async with asyncio.timeout(300):
            while True:
                for line in self.log:
                    if line["message"] == message:
                        return line
                if self.is_over():
                    raise AssertionError(f"it ended before {message!r}: {self.log}")
                await asyncio.sleep(0.02)

    async def listening(self) -> None:
        line = await self.logged("listening")
        self.url = f"http://127.0.0.1:{line['port']}"
        self.admin_url = f"http://127.0.0.1:{line['admin_port']}"

    async def ready(self) -> None:
        await self.logged("ready")


@dataclass
class Process(Replica):
    """In a process of its own, with its engine in another one."""

    process: asyncio.subprocess.Process = field(kw_only=True)

    def is_over(self) -> bool:
        return self.process.returncode is not None

    async def ended(self) -> int:
        async with asyncio.timeout(300):
            return await self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    @property
    def engine_pid(self) -> int:
        """The one child of the API process."""
        (child,) = children(self.process.pid)
        return child


@dataclass
class Here(Replica):
    """In this process."""

    task: "asyncio.Task[int]" = field(kw_only=True)

    def is_over(self) -> bool:
        return self.task.done()

    async def ended(self) -> int:
        async with asyncio.timeout(300):
            return await self.task

    def terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def children(pid: int) -> list[int]:
    """The processes that this one has started, from any of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def command_line(model: str, flags: tuple[str, ...]) -> list[str]:
    return [
        *("serve", model, "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"),
        *("--kv-cache-bytes", "16Mi", "--max-num-seqs", "4", *flags),
    ]


def without_model(flags: tuple[str, ...]) -> list[str]:
    return ["serve", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *flags]


@asynccontextmanager
async def serving(*flags: str, model: str | None = f"file://{TINY}") -> AsyncIterator[Process]:
    """A replica as it runs in a pod. model: None waits for POST /model."""
    with tempfile.TemporaryDirectory(prefix="slw") as run:
        process = await asyncio.create_subprocess_exec(
            *RUNTIME,
            *(without_model(flags) if model is None else command_line(model, flags)),
            stderr=subprocess.PIPE,
            env={**os.environ, **SETTINGS, "SLIPWAY_RUN_DIR": run},
        )
        running = Process(Path(run), process=process)

        async def read() -> None:
            assert process.stderr is not None
            async for line in process.stderr:
                running.log.append(json.loads(line))

        reader = asyncio.create_task(read())
        try:
            await running.listening()
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reader


@asynccontextmanager
async def serving_here(
    *flags: str, model: str | None = f"file://{TINY}", run_files: Mapping[str, bytes] | None = None
) -> AsyncIterator[Here]:
    """The same on the loop of the test, with its engine on a thread. Signals for it come to this process.

    model: None waits for POST /model. run_files: what an earlier run left in the run directory.
    """
    with tempfile.TemporaryDirectory(prefix="slw") as run, capture_logs([_renamed]) as log:
        for name, content in (run_files or {}).items():
            (Path(run) / name).write_bytes(content)
        arguments = without_model(flags) if model is None else command_line(model, flags)
        settings = serve_settings(parse_arguments([*arguments, "--in-process"]), {**SETTINGS, "SLIPWAY_RUN_DIR": run})
        running = Here(Path(run), log, task=asyncio.create_task(serve(settings)))  # type: ignore[arg-type]
        try:
            await running.listening()
            yield running
        finally:
            if not running.is_over():
                running.terminate()
            await running.ended()


def _renamed(_: object, __: str, event: Any) -> Any:
    event["message"] = event.pop("event")
    return event
