"""Serves tarballs to Flux's controllers as source-controller does: over HTTP, each described by its digest.

A source's object (an ExternalArtifact, an OCIRepository) names the address in its status.
"""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


class ArtifactServer:
    """An HTTP server on loopback with tarballs, each at a path made of its digest."""

    def __init__(self) -> None:
        self._tarballs: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self._tarballs))

    def start(self) -> None:
        """Serve, in a thread of its own."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Serve no more; only after `start`."""
        self._server.shutdown()
        self._server.server_close()

    def add(self, tarball: bytes) -> Json:
        """Serve a tarball; returns it as Flux's `status.artifact` describes it."""
        digest = hashlib.sha256(tarball).hexdigest()
        self._tarballs[f"/{digest}.tar.gz"] = tarball
        return {
            "url": f"http://127.0.0.1:{self._server.server_port}/{digest}.tar.gz",
            "path": f"{digest}.tar.gz",
            "revision": f"main@sha256:{digest}",
            "digest": f"sha256:{digest}",
            "size": len(tarball),
            "lastUpdateTime": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }


def tarball_of(files: Mapping[str, str]) -> bytes:
    """A tar.gz of the files; the same files make the same bytes."""
    packed = io.BytesIO()
    # Without the time that gzip would write down.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content.encode()), 0o644
            tar.addfile(member, io.BytesIO(content.encode()))
    return packed.getvalue()


def _handler_of(tarballs: Mapping[str, bytes]) -> type[BaseHTTPRequestHandler]:
    """A request handler that serves these bodies by their paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = tarballs.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not logged; the controller logs what it fetches."""

    return Handler
