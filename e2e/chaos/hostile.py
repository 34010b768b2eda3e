"""Clients that misbehave: header dribblers, stalled uploads, readers that never read, quick disconnects, big bodies."""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\n"
TICK_SECONDS = 0.5


def request(model: str, prompt: str = "Tell me a story.", tokens: int = 400, key: str = "", more: str = "") -> bytes:
    """A complete streamed request, with a tenant's key and more header lines if they are given."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
    ).encode()
    head = HEAD + (f"Authorization: Bearer {key}\r\n" if key else "") + more
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def connections(port: int, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Open connections that have sent `first`; closed at the end of the block."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            with contextlib.suppress(OSError):  # refused while it sends: a closed connection is what we may get
                opened[-1].sendall(first)
        yield opened
    finally:
        for one in opened:
            one.close()


@contextlib.contextmanager
def header_dribblers(port: int, count: int = 200) -> Iterator[list[socket.socket]]:
    """Clients that send one header byte every half second and never finish the request."""
    with connections(port, count, HEAD.encode()) as opened, dribbling(opened, b"x"):
        yield opened


@contextlib.contextmanager
def stalled_uploads(port: int, count: int = 16, sent: int = 2**20) -> Iterator[list[socket.socket]]:
    """Clients that announce 16 MiB, send `sent` bytes, and stop."""
    first = f"{HEAD}Content-Length: {2**24 - 1}\r\n\r\n".encode() + b'{"pad": "' + b"x" * sent
    with connections(port, count, first) as opened:
        yield opened


@contextlib.contextmanager
def deaf_readers(port: int, model: str, count: int = 16) -> Iterator[list[socket.socket]]:
    """Clients that ask for long streams and never read one byte."""
    with connections(port, count, request(model)) as opened:
        yield opened


@contextlib.contextmanager
def dribbling(opened: list[socket.socket], piece: bytes) -> Iterator[None]:
    """Send `piece` on every connection twice a second while the block runs; closed ones are left out."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(TICK_SECONDS):
            for one in opened:
                with contextlib.suppress(OSError):
                    one.send(piece)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10)


def disconnect_at_once(port: int, model: str, count: int = 2000) -> None:
    """Send a request and leave without reading, `count` times."""
    wanted = request(model, tokens=64)
    for _ in range(count):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as one:
            one.sendall(wanted)


def send_big_bodies(port: int, model: str, count: int = 8, size: int = 5 * 2**20) -> list[int]:
    """Send complete requests with prompts of `size` bytes; the statuses of the answers, 0 for a broken connection."""
    statuses = []
    for _ in range(count):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
                one.sendall(request(model, prompt="word " * (size // 5)))
                statuses.append(int(one.recv(4096).split(b" ", 2)[1]))
        except (OSError, IndexError):
            statuses.append(0)
    return statuses


@contextlib.contextmanager
def hostile_tenant(port: int, model: str, key: str) -> Iterator[Counter[str]]:
    """One tenant in five threads, until the block ends: counts its answers by kind and status, 0 if there was none.

    It sends bodies of 5 MB, prompts longer than any context, encoded bodies, and streams that it abandons, and uses up
    its quota.
    """
    kinds = {
        "big body": request(model, prompt="word " * 2**20, key=key),
        "long prompt": request(model, prompt="lamp " * 20_000, key=key),
        "encoding": request(model, key=key, more="Content-Encoding: gzip\r\n"),
        "abandoned": request(model, tokens=64, key=key),
        "quota": request(model, tokens=1, key=key),
    }
    over = threading.Event()
    seen: Counter[str] = Counter()

    def run(kind: str) -> None:
        while not over.wait(0.02):
            seen[f"{kind} {first_status(port, kinds[kind])}"] += 1

    threads = [threading.Thread(target=run, args=(kind,), daemon=True) for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=60)


def first_status(port: int, sent: bytes) -> int:
    """The status of the answer to these bytes; 0 without an answer. Its stream is abandoned after the first piece."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
            with contextlib.suppress(OSError):  # refused while it sends: the answer may be there
                one.sendall(sent)
            return int(one.recv(4096).split(b" ", 2)[1])
    except (OSError, IndexError, ValueError):
        return 0


def count_open(opened: list[socket.socket]) -> int:
    """How many of the connections the server has not closed."""
    return sum(not is_closed(one) for one in opened)


def is_closed(one: socket.socket) -> bool:
    """Whether the server has closed this connection; what it has said until then is read and dropped."""
    one.setblocking(False)
    try:
        while one.recv(65536):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            one.setblocking(True)
            one.settimeout(10)


def wait_closed(opened: list[socket.socket], timeout: float) -> int:
    """Wait until the server has closed all of them; how many are still open at the end."""
    deadline = time.monotonic() + timeout
    while (left := count_open(opened)) and time.monotonic() < deadline:
        time.sleep(TICK_SECONDS)
    return left
