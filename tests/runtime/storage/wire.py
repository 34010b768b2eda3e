"""A TCP wire between a client and a server, which counts and can be cut."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass
class Wire:
    """Bytes that came from the server; `cut_after` so many breaks the connection that carries the next, once."""

    port: int = 0
    received: int = 0
    cut_after: int | None = None


@contextmanager
def a_wire(to_port: int) -> Iterator[Wire]:
    wire = Wire()
    listener = socket.create_server(("127.0.0.1", 0))
    wire.port = listener.getsockname()[1]

    def pump(source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if counts:
                    wire.received += len(data)
                    if wire.cut_after is not None and wire.received > wire.cut_after:
                        wire.cut_after = None
                        break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", to_port))
                threading.Thread(target=pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=pump, args=(server, client, True), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield wire
    finally:
        listener.close()
