"""Records the requests of agent programs, as bodies for `tests/runtime/server/test_recorded_requests.py`.

    python -m e2e.record_programs FOLDER_OF_NPM_COMMANDS

Runs each program of `e2e/stories/test_agent_programs.py` against a runtime, through a proxy that keeps the bodies.
Texts are removed: they are the programs' own, long, and of no use to a test. Structure, field names and short values
stay; random ids become one id.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from aiohttp import ClientSession, ClientTimeout, web

from bench.servers import a_runtime
from e2e.scripted_server import loopback_only
from e2e.stories.test_agent_programs import PROGRAM_SECONDS, PROGRAMS
from tests.scripted_model import write_checkpoint

FOLDER: Final = Path(__file__).parents[1] / "tests" / "runtime" / "server" / "recorded"
RANDOM: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=toolu_)[0-9a-f]{24}|(?<=call_)[0-9a-f]{24}")
LONGEST: Final = 60  # characters of a text that is kept
PRIVATE: Final = {"description", "instructions", "text", "content", "output", "thinking", "title", "examples"}
KEPT_KEYS: Final = {"properties", "$defs", "definitions"}  # their keys are names of fields, not fields of ours


def without_texts(value: Any, key: str = "") -> Any:
    """The same structure; texts of people and programs are one word."""
    if isinstance(value, dict):
        inside_names = key in KEPT_KEYS
        return {name: without_texts(one, "" if inside_names else name) for name, one in value.items()}
    if isinstance(value, list):
        return [without_texts(one, key) for one in value]
    if isinstance(value, str):
        value = RANDOM.sub("0", value)
    is_text = isinstance(value, str) and (key in PRIVATE or len(value) > LONGEST or "/" in value)
    return "words" if is_text and key not in ("type", "$schema", "arguments") else value


class Recorder:
    """A proxy in front of one server, which keeps the JSON bodies of POST requests."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Keep the body, and pass request and answer on."""
        body = await request.read()
        if request.method == "POST" and body:
            self.bodies.append({"path": request.path_qs, "body": without_texts(json.loads(body))})
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")}
        async with (
            ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False) as session,
            session.request(request.method, self._upstream + request.path_qs, data=body, headers=headers) as answer,
        ):
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


async def record(commands: Path, upstream: str) -> None:
    """Run each program once, and write its bodies to a file of its name."""
    FOLDER.mkdir(exist_ok=True)
    for program in PROGRAMS:
        recorder = Recorder(upstream)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", recorder.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            command, settings = program(f"http://127.0.0.1:{port}", home)
            ended = await asyncio.to_thread(
                subprocess.run, [commands / command[0], *command[1:]], cwd=home, env=loopback_only(home) | settings,
                stdin=subprocess.DEVNULL, capture_output=True, timeout=PROGRAM_SECONDS, check=False,
            )  # fmt: skip
        await runner.cleanup()
        name = program.__name__
        (FOLDER / f"{name}.json").write_text(json.dumps(recorder.bodies, indent=1, sort_keys=True) + "\n")
        print(f"{name}: exit {ended.returncode}, {len(recorder.bodies)} requests")


def main() -> None:
    """Record all programs."""
    with tempfile.TemporaryDirectory() as folder, a_runtime(model=write_checkpoint(Path(folder))) as runtime:
        asyncio.run(record(Path(sys.argv[1]), runtime.url))


if __name__ == "__main__":
    main()
