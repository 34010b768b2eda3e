"""A web server that counts what it sends, and can fail in every way that servers fail."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Origin:
    """Files by path; each field is one way to misbehave."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)  # body bytes by path
    asked: list[tuple[str, str]] = field(default_factory=list)  # path and Authorization of each request
    etags: dict[str, str] = field(default_factory=dict)
    reads_from_the_middle: bool = True
    bearer: str = ""  # asked for when set
    cuts: dict[str, int] = field(default_factory=dict)  # how often the connection breaks in the middle of a body
    failures: dict[str, list[int]] = field(default_factory=dict)  # statuses to answer first, by path
    redirect_to: str = ""  # another origin that has the files
    claims: dict[str, int] = field(default_factory=dict)  # sizes that are lies
    stall_after: int | None = None  # total body bytes, then every answer hangs until `go_on`, and breaks
    go_on: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # one for each that hangs
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total_sent(self) -> int:
        return sum(self.sent.values())


@contextmanager
def an_origin() -> Iterator[Origin]:
    origin = Origin()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path
            with origin.lock:
                origin.asked.append((path, self.headers.get("Authorization", "")))
                failure = origin.failures[path].pop(0) if origin.failures.get(path) else None
            if failure is not None:
                return self.answer(failure, b"", {"Retry-After": "0"})
            if origin.redirect_to:
                return self.answer(302, b"", {"Location": origin.redirect_to + path})
            if origin.bearer and self.headers.get("Authorization") != f"Bearer {origin.bearer}":
                return self.answer(401, b"", {})
            if path not in origin.files:
                return self.answer(404, b"", {})
            content = origin.files[path]
            size = origin.claims.get(path, len(content))
            start, end, status = 0, len(content), 200
            headers = {"ETag": origin.etags[path]} if path in origin.etags else {}
            if origin.reads_from_the_middle and (wanted := self.headers.get("Range", "")):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end, status = int(first), min(len(content), int(last) + 1), 206
                if start >= size:
                    return self.answer(416, b"", headers)
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            return self.answer(status, content[start:end], headers)

        def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            cut = len(content) > 1 and origin.cuts.get(self.path, 0) > 0
            if cut:
                with origin.lock:
                    origin.cuts[self.path] -= 1
                content = content[: len(content) // 2]
                self.close_connection = True
            try:
                self.send(content)
            except OSError:
                self.close_connection = True  # the client has what it wants, or is gone

        def send(self, content: bytes) -> None:
            for first in range(0, len(content), 16_384):
                piece = content[first : first + 16_384]
                if origin.stall_after is not None and origin.total_sent + len(piece) > origin.stall_after:
                    origin.stalled.release()
                    origin.go_on.wait()
                    raise BrokenPipeError("whoever asked is gone")
                with origin.lock:
                    origin.sent[self.path] = origin.sent.get(self.path, 0) + len(piece)
                self.wfile.write(piece)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    origin.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield origin
    finally:
        origin.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


def a_model(size: int = 1 << 20) -> dict[str, bytes]:
    """A checkpoint's files under /tiny, as far as a web server cares; every byte of the weights says where it is."""
    weights = b"".join(number.to_bytes(8, "big") for number in range(size // 8))
    return {
        "/tiny/config.json": b'{"model_type": "llama"}',
        "/tiny/tokenizer.json": b"{}",
        "/tiny/model.safetensors": weights,
        "/tiny/pytorch_model.bin": b"a pickle",
    }
