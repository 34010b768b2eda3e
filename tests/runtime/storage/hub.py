"""A small hub on this machine: the calls that fetching a snapshot makes, answered for real over HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """Repositories by name; each has files by revision."""

    url: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # the Authorization of each request
    gated: set[str] = field(default_factory=set)  # repositories whose terms nobody has accepted
    corrupt: set[str] = field(default_factory=set)  # files that arrive broken, once
    parameters: dict[str, int] = field(default_factory=dict)  # by repository: what it tells of its safetensors
    away: bool = False  # answers 503 to everything
    cut_after: int | None = None  # bytes, once: the connection breaks in the middle of a file

    def sha(self, repository: str, revision: str) -> str:
        return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()

    def find(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in self.repositories.get(repository, {}).items():
            sha = self.sha(repository, name)
            if revision in {name, sha}:
                return sha, files
        return None


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it: large ones by SHA-256, small ones by git's own hash."""
    oid = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if path.endswith(".safetensors"):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return found


def sibling(path: str, content: bytes) -> dict[str, Any]:
    """The same, as the repository itself lists it when asked for blobs."""
    listed = entry(path, content)
    found: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": listed["oid"]}
    if "lfs" in listed:
        found["lfs"] = {"sha256": listed["lfs"]["oid"], "size": len(content), "pointerSize": 134}
    return found


@contextmanager
def a_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            if hub.away:
                return self.send(503, b"", {})
            hub.tokens.append(self.headers.get("Authorization", ""))
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                return self.about("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", parts[4:5] == ["tree"])
            return self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)

        def about(self, repository: str, revision: str, tree: bool) -> None:
            if repository not in hub.repositories:
                return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if repository in hub.gated:
                return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if (found := hub.find(repository, revision)) is None:
                return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            sha, files = found
            if tree:
                return self.send(200, json.dumps([entry(*file) for file in files.items()]).encode(), {})
            about: dict[str, Any] = {
                "id": repository,
                "sha": sha,
                "private": False,
                "downloads": 0,
                "tags": [],
                "siblings": [sibling(*file) for file in files.items()],
            }
            if repository in hub.parameters:
                about["safetensors"] = {"total": hub.parameters[repository]}
            return self.send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

        def file(self, repository: str, revision: str, name: str, body: bool) -> None:
            found = hub.find(repository, revision)
            if found is None or name not in found[1]:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            sha, content = found[0], found[1][name]
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": sha,
                "Accept-Ranges": "bytes",
            }
            status, start, end = 200, 0, len(content)
            if (wanted := self.headers.get("Range", "")).startswith("bytes="):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(len(content), int(last) + 1 if last else len(content))
                status = 206
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            if body and name in hub.corrupt:
                hub.corrupt.discard(name)
                content = bytes(len(content))
            if body:
                hub.downloads.append(f"{name}@{start}" if start else name)
            return self.send(status, content[start:end], headers, body=body)

        def send(self, status: int, content: bytes, headers: dict[str, str], body: bool = True) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not body:
                return
            if hub.cut_after is not None and len(content) > hub.cut_after:
                self.wfile.write(content[: hub.cut_after])
                hub.cut_after = None
                self.close_connection = True
                return
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
