"""Launcher of the engine process, on the API side: starts it, follows its loading, talks to it, notices its end.

    engine = await EngineProcess.launch(path, options, run_directory=…, on_progress=…)   # seconds to minutes
    client = EngineClient(engine)

Two ZeroMQ sockets in a directory that only this user can open; msgpack in both directions; one message a step. The
PULL side binds and the PUSH side connects: a PUSH socket that binds takes no message before its peer is there.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import zmq

from slipway_runtime.boot_memory import BootMemory, decode
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.messages import EngineEvent, EngineFailed, Loaded, Loading, Message, Pulse, StepReport, WarmingUp

BOOT_FLAG: Final = "--boot"  # of the engine process: import everything first, then write to this file descriptor
FINAL_MESSAGE_SECONDS: Final = 0.3  # for the last message of an engine that ended to arrive
_LONGEST_RUN_DIRECTORY: Final = 80  # Linux allows 107 bytes for the path of a socket


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a new engine process reads from its standard input, which then stays open while its parent lives."""

    directory: str  # of the sockets
    model_path: str
    options: EngineOptions
    log_level: str = "INFO"


class EngineNotLoadedError(Exception):
    """The engine could not be built; the message is a sentence for the user, `trace` is for the log."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.trace = trace


class BootedEngine:
    """An engine process without a model yet: it imports torch and the kernels, and then waits for a model."""

    def __init__(self, process: asyncio.subprocess.Process, booted: "asyncio.Future[BootMemory | None]") -> None:
        self.process = process
        self._booted = booted

    @classmethod
    async def start(cls) -> "BootedEngine":
        """Start the process; returns at once."""
        loop = asyncio.get_running_loop()
        booted: asyncio.Future[BootMemory | None] = loop.create_future()
        reading, writing = os.pipe()

        def on_booted() -> None:
            loop.remove_reader(reading)
            measured = decode(os.read(reading, 4096))  # one write, smaller than the pipe
            os.close(reading)
            if not booted.done():
                booted.set_result(measured)

        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "slipway_runtime.engine.process", BOOT_FLAG, str(writing)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)  # our copy: only the child's is left, so its end is noticed too
        loop.add_reader(reading, on_booted)
        return cls(process, booted)

    async def wait(self) -> BootMemory | None:
        """Return the memory in use once everything is imported; None where the process ended instead."""
        return await asyncio.shield(self._booted)

    async def stop(self) -> None:
        """End the process."""
        await _kill(self.process)


class EngineProcess:
    """A Transport to an engine in a process of its own. It dies with this process, however this one ends."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: "_Pipe", loaded: Loaded) -> None:
        self.facts = loaded.facts
        self.first_stats = loaded.stats
        self.pid = process.pid
        self._process = process
        self._pipe = pipe
        pipe.connect()
        self._encoder = msgspec.msgpack.Encoder()
        self._watcher: asyncio.Task[None] | None = None
        self.on_pulse: Callable[[], None] = lambda: None

    @classmethod
    async def launch(
        cls,
        model_path: Path,
        options: EngineOptions,
        *,
        run_directory: Path | None = None,
        log_level: str = "INFO",
        on_progress: Callable[[Loading | WarmingUp], object] = lambda _: None,
        booted: BootedEngine | None = None,
    ) -> "EngineProcess":
        """Start an engine and return when it is warm. Raises EngineNotLoadedError; cancelling ends the process.

        With `booted`, the engine is built in that process, whose imports are done or under way.
        """
        pipe = _Pipe(run_directory)
        if booted is not None and booted.process.returncode is None:
            process = booted.process
        else:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "slipway_runtime.engine.process", stdin=asyncio.subprocess.PIPE
            )
        try:
            assert process.stdin is not None
            start = EngineStart(
                directory=str(pipe.directory), model_path=str(model_path), options=options, log_level=log_level
            )
            process.stdin.write(encode_start(start))
            loaded = await _until_loaded(process, pipe, on_progress)
        except BaseException:
            await _kill(process)
            pipe.close()
            raise
        return cls(process, pipe, loaded)

    def start(self, on_report: Callable[[StepReport], None], on_death: Callable[[str], None]) -> None:
        """Begin to listen; both functions are called on the event loop."""

        def on_event(event: EngineEvent) -> None:
            if isinstance(event, StepReport):
                on_report(event)
            elif isinstance(event, Pulse):
                self.on_pulse()
            elif isinstance(event, EngineFailed):
                self._end(event.error, on_death)

        self._pipe.listen(on_event)
        self._watcher = asyncio.create_task(self._watch(on_death))

    def send(self, message: Message) -> None:
        """Hand over a message; the engine takes it before its next step."""
        if not self._pipe.closed:  # else the engine is gone, and `on_death` has said so
            self._pipe.requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def stop(self) -> None:
        """Kill the process at once: it holds no state that must be saved."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._pipe.close()
        await _kill(self._process)

    async def _watch(self, on_death: Callable[[str], None]) -> None:
        code = await self._process.wait()
        await asyncio.sleep(FINAL_MESSAGE_SECONDS)  # a last message cancels this task
        self._end(describe_exit("the engine process", code), on_death)

    def _end(self, error: str, on_death: Callable[[str], None]) -> None:
        assert self._watcher is not None
        self._watcher.cancel()
        self._pipe.close()
        on_death(error)


class _Pipe:
    """The API side's ends of both sockets."""

    def __init__(self, run_directory: Path | None) -> None:
        self.directory = _private_directory(run_directory)
        self._context = zmq.Context()
        self.requests = self._context.socket(zmq.PUSH)
        self.requests.set_hwm(0)  # never blocks, never drops: the messages are bounded by admitted requests
        self._events = self._context.socket(zmq.PULL)
        self._events.set_hwm(0)
        self._events.bind(f"ipc://{self.directory}/events")
        self._descriptor = int(self._events.getsockopt(zmq.FD))
        self._decoder = msgspec.msgpack.Decoder(EngineEvent)
        self._listener: Callable[[EngineEvent], None] | None = None

    def connect(self) -> None:
        """Connect to the socket of an engine that is loaded. Before it is bound, a connection is tried each 100 ms."""
        self.requests.connect(f"ipc://{self.directory}/requests")

    def listen(self, listener: Callable[[EngineEvent], None]) -> None:
        """Call the listener for each message from now on; it takes the place of an earlier one."""
        if self._listener is None:
            asyncio.get_running_loop().add_reader(self._descriptor, self._drain)
        self._listener = listener
        asyncio.get_running_loop().call_soon(self._drain)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return bool(self._context.closed)

    def close(self) -> None:
        """Close both sockets and remove their directory. Idempotent."""
        if self.closed:
            return
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._listener = None
        self._context.destroy(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _drain(self) -> None:
        # The descriptor is edge-triggered, so all messages must be read now.
        while (
            self._listener is not None
            and not self._context.closed
            and int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        ):
            self._listener(self._decoder.decode(self._events.recv(zmq.NOBLOCK)))


async def _until_loaded(
    process: asyncio.subprocess.Process, pipe: _Pipe, on_progress: Callable[[Loading | WarmingUp], object]
) -> Loaded:
    loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()

    def on_event(event: EngineEvent) -> None:
        if isinstance(event, Loading | WarmingUp):
            on_progress(event)
        elif not loaded.done():
            if isinstance(event, Loaded):
                loaded.set_result(event)
            elif isinstance(event, EngineFailed):
                loaded.set_exception(EngineNotLoadedError(event.error, event.trace))

    pipe.listen(on_event)
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((loaded, ended), return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            await asyncio.wait({loaded}, timeout=FINAL_MESSAGE_SECONDS)
        if not loaded.done():
            raise EngineNotLoadedError(describe_exit("the engine process", process.returncode or 0))
        return loaded.result()
    finally:
        ended.cancel()


def encode_start(start: EngineStart) -> bytes:
    """The start message as it is written to the standard input: four bytes of length, then msgpack."""
    body = msgspec.msgpack.encode(start)
    return len(body).to_bytes(4, "big") + body


def describe_exit(who: str, code: int) -> str:
    """A sentence about a process, from its exit code or, if that is negative, the signal that ended it."""
    if code == -9:
        return f"{who} was killed (signal 9): out of memory, if nobody did it on purpose"
    return f"{who} ended with {f'signal {-code}' if code < 0 else f'code {code}'}"


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def _private_directory(run_directory: Path | None) -> Path:
    """A new directory that only this user may enter: in the run directory, unless that cannot be."""
    fits = run_directory is not None and len(str(run_directory)) <= _LONGEST_RUN_DIRECTORY
    parent = run_directory if fits and os.access(str(run_directory), os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="engine-", dir=parent))
