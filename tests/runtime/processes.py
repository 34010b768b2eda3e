"""`slipway-runtime serve` as a process of its own, and what a test holds it by."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[2] / "models" / "tiny"
RUNTIME = [sys.executable, "-m", "slipway_runtime.main"]
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Process:
    """A running replica and what it has logged so far."""

    process: asyncio.subprocess.Process
    log: list[dict[str, Any]]
    run_directory: Path
    port: int = 0
    admin_port: int = 0

    async def logged(self, message: str) -> dict[str, Any]:
        async with asyncio.timeout(90):
            while True:
                for line in self.log:
                    if line["message"] == message:
                        return line
                if self.process.returncode is not None:
                    raise AssertionError(f"ended with {self.process.returncode} before {message!r}: {self.log}")
                await asyncio.sleep(0.02)

    async def ready(self) -> None:
        await self.logged("ready")

    async def ended(self) -> int:
        async with asyncio.timeout(60):
            return await self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """The one child of the API process."""
        (child,) = children(self.process.pid)
        return child


def children(pid: int) -> list[int]:
    """The processes that this one has started, from any of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@asynccontextmanager
async def serving(*flags: str, model: str = f"file://{TINY}", wait: bool = True) -> AsyncIterator[Process]:
    with tempfile.TemporaryDirectory(prefix="slw") as run:
        process = await asyncio.create_subprocess_exec(
            *RUNTIME,
            *("serve", model, "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"),
            *("--kv-cache-bytes", "16Mi", "--max-num-seqs", "4", *flags),
            stderr=subprocess.PIPE,
            env={**os.environ, **SETTINGS, "SLIPWAY_RUN_DIR": run},
        )
        running = Process(process, [], Path(run))

        async def read() -> None:
            assert process.stderr is not None
            async for line in process.stderr:
                running.log.append(json.loads(line))

        reader = asyncio.create_task(read())
        try:
            if wait:
                listening = await running.logged("listening")
                running.port, running.admin_port = listening["port"], listening["admin_port"]
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reader
