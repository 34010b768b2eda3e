"""`slipway-agent` as a process of its own, and what a test holds it by."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipway_api.admin_token import token_digest
from slipway_api.dialect import ENV_DIALECT, built_in
from slipway_api.internal_tls import replicas_name
from slipway_api.names import ENV_ADMIN_TOKEN_SHA256
from tests.operator.tls_files import TlsFiles

WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from slipway_agent.main import main; main()"
TOKEN = "the admin token of a test"
TEAM = replicas_name("team")


@dataclass
class AgentProcess:
    """A running agent and what it has logged so far."""

    process: asyncio.subprocess.Process
    run_directory: Path
    admin_url: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)

    async def logged(self, message: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                for line in self.log:
                    if line["message"] == message:
                        return line
                if self.process.returncode is not None:
                    raise AssertionError(f"it ended before {message!r}: {self.log}")
                await asyncio.sleep(0.02)


def vllm_dialect(**change: Any) -> str:
    """The built-in document of vLLM, with times that suit a test."""
    raw = built_in("vllm").to_json()
    raw["drain"]["quietSeconds"] = 1
    return json.dumps(raw | change)


def tls_flags(files: TlsFiles) -> tuple[str, ...]:
    """The flags with which an agent serves TLS, and verifies an engine of the same namespace."""
    return ("--tls-directory", str(files.folder), "--tls-name", TEAM)


def mounted(folder: Path) -> TlsFiles:
    """The certificate of a namespace; a test reaches it as localhost."""
    files = TlsFiles(folder)
    files.issue(TEAM, "localhost")
    return files


@asynccontextmanager
async def an_agent(
    engine_url: str, *flags: str, dialect: str = "", boot_list: Path | None = None, without_rich: bool = False
) -> AsyncIterator[AgentProcess]:
    """Beside the engine at this address."""
    with tempfile.TemporaryDirectory(prefix="slw") as run:
        process = await asyncio.create_subprocess_exec(
            *([sys.executable, "-c", WITHOUT_RICH] if without_rich else [sys.executable, "-m", "slipway_agent.main"]),
            *("serve", "--engine-url", engine_url),
            *("--host", "127.0.0.1", "--admin-port", "0", *flags),
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "SLIPWAY_RUN_DIR": run,
                ENV_DIALECT: dialect or vllm_dialect(),
                ENV_ADMIN_TOKEN_SHA256: token_digest(TOKEN),
                **({"SLIPWAY_BOOT_LIST": str(boot_list)} if boot_list else {}),
            },
        )
        agent = AgentProcess(process, Path(run))

        async def read() -> None:
            assert process.stderr is not None
            async for line in process.stderr:
                agent.log.append(json.loads(line))

        reader = asyncio.create_task(read())
        try:
            host = "https://localhost" if "--tls-directory" in flags else "http://127.0.0.1"
            agent.admin_url = f"{host}:{(await agent.logged('listening'))['admin_port']}"
            yield agent
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            await reader
