"""The engine process: builds an engine, reports its loading, and steps until its parent ends.

    python -m slipway_runtime.engine.process < EngineStart

Its own GIL: scheduling never waits for HTTP or detokenizing. Reading and writing messages happen on threads of their
own, so that they overlap the computation.
"""

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import zmq

from slipway_api import logs
from slipway_runtime.boot_memory import BootMemory, encode
from slipway_runtime.engine.launch import BOOT_FLAG, EngineStart
from slipway_runtime.engine.loop import StepLoop
from slipway_runtime.messages import EngineEvent, EngineFailed, Loaded, Message, Pulse

PULSE_SECONDS: Final = 0.5


def main() -> int:
    """Run the engine process; the exit code."""
    # Signals are handled by the parent: it drains, and this process ends with it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if BOOT_FLAG in sys.argv:
        _boot(int(sys.argv[sys.argv.index(BOOT_FLAG) + 1]))
    start = _read_start(sys.stdin.buffer)
    if start is None:
        return 0
    threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), name="parent", daemon=True).start()
    logs.configure("runtime", start.log_level)
    with zmq.Context() as context:
        events: queue.SimpleQueue[EngineEvent | None] = queue.SimpleQueue()
        writer = threading.Thread(target=_write, args=(context, start.directory, events), name="write", daemon=True)
        writer.start()

        def send_failure(failure: EngineFailed) -> None:
            events.put(failure)
            events.put(None)
            writer.join()

        def on_death(failure: EngineFailed) -> None:
            # Called on another thread: the main thread may wait in a sum for a rank that has ended.
            send_failure(failure)
            context.term()  # returns when the message has been sent
            os._exit(1)

        send_failure(_serve(start, context, events.put, on_death))
    return 1


def _serve(
    start: EngineStart,
    context: "zmq.Context[zmq.Socket[bytes]]",
    send: Callable[[EngineEvent], None],
    on_death: Callable[[EngineFailed], None],
) -> EngineFailed:
    """Build an engine and step it until it fails; the failure."""
    # Imported only here: torch costs seconds, and the parent should notice at once that the process runs.
    from slipway_runtime.engine.build import build_engine
    from slipway_runtime.engine.ranks import RankDiedError
    from slipway_runtime.models.config import ModelRefusedError

    try:
        engine = build_engine(
            Path(start.model_path), start.options, on_progress=send, on_death=on_death, directory=Path(start.directory)
        )
    except (ModelRefusedError, FileNotFoundError, ValueError, RankDiedError) as refused:
        return EngineFailed(str(refused))
    except Exception as error:  # noqa: BLE001  whatever a strange checkpoint does is reported
        return EngineFailed(f"{type(error).__name__}: {error}", traceback.format_exc())
    loop = StepLoop(engine, time.monotonic)
    # Bound before the parent hears that it may connect: else the first request would wait for a connection's retry.
    requests = context.socket(zmq.PULL)
    requests.set_hwm(0)
    requests.linger = 0
    requests.bind(f"ipc://{start.directory}/requests")
    send(Loaded(engine.facts, engine.stats(time.monotonic())))
    threading.Thread(target=_read, args=(requests, loop), name="read", daemon=True).start()
    threading.Thread(target=_pulse, args=(send,), name="pulse", daemon=True).start()
    try:
        loop.run(send)
    except RankDiedError as died:
        return EngineFailed(str(died))
    except Exception as error:  # noqa: BLE001  whatever ended the loop, the streams must get the error
        return EngineFailed(f"{type(error).__name__}: {error}", traceback.format_exc())
    return EngineFailed("the step loop ended without a reason")


def _read(requests: "zmq.Socket[bytes]", loop: StepLoop) -> None:
    try:
        with requests:
            decoder = msgspec.msgpack.Decoder(Message)
            while True:
                loop.send(decoder.decode(requests.recv()))
    except zmq.ContextTerminated:
        pass  # the loop has failed, and the process ends
    except Exception as error:  # noqa: BLE001  an engine that gets no messages is worse than one that ends
        loop.stop(error)


def _write(
    context: "zmq.Context[zmq.Socket[bytes]]", directory: str, events: "queue.SimpleQueue[EngineEvent | None]"
) -> None:
    with context.socket(zmq.PUSH) as socket:
        socket.set_hwm(0)
        socket.linger = 2000  # milliseconds to send the last message
        socket.connect(f"ipc://{directory}/events")
        encoder = msgspec.msgpack.Encoder()
        while (message := events.get()) is not None:
            socket.send(encoder.encode(message))


def _pulse(send: Callable[[EngineEvent], None]) -> None:
    # A long step releases the GIL and lets this thread run; a stopped process stops it, too.
    while True:
        time.sleep(PULSE_SECONDS)
        send(Pulse())


def _boot(done: int) -> None:
    """Do what needs no model: import torch and the kernels, and create the GPU's context, where there is a GPU.

    Then writes the memory in use to the file descriptor `done`.
    """
    import torch

    import slipway_runtime.engine.build  # noqa: F401  everything that an engine is built from
    from slipway_runtime.kernels import native

    native.library()
    device = 0
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            device += total - free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    os.write(done, encode(BootMemory(device_bytes=device, host_bytes=pages * os.sysconf("SC_PAGE_SIZE"))))
    os.close(done)


def _read_start(stream: BinaryIO) -> EngineStart | None:
    """Read what to build; None where the parent ended before it had a model."""
    head = stream.read(4)
    if not head:
        return None
    length = int.from_bytes(head, "big")
    return msgspec.msgpack.decode(stream.read(length), type=EngineStart)


def _end_with_parent(stream: BinaryIO) -> None:
    # The parent keeps the other end open; the kernel closes it, whatever ended the parent.
    stream.read(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
