"""HTTP sources of files: range requests, for the hub too, and `http(s)://host/folder`, a folder on a web server.

A redirect to another host carries no `Authorization`: the client drops it where the origin changes. Responses are never
compressed, so that a range is a range of the file.

Where an address comes from a client, only hosts of the public Internet are asked (public_network.py).

A web server lists no folder: each usual file name is requested. The folder holds what a checkpoint's folder holds:
`config.json`, `tokenizer.json` and `model.safetensors`, or `model.safetensors.index.json` and its shards; an adapter's
`adapter_config.json` and `adapter_model.safetensors` likewise. With a `SHA256SUMS` beside them every file is checked.
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote, urlsplit

import httpx

from slipway_runtime.storage.public_network import PublicTransport
from slipway_runtime.storage.source import (
    INDEX,
    SUMS,
    AccessDeniedError,
    Checksum,
    FetchError,
    Interrupted,
    ModelNotFoundError,
    RemoteFile,
    describe_silence,
    parse_sums,
    read_whole,
)

TIMEOUT: Final = httpx.Timeout(60.0, connect=10.0)  # seconds without a byte
_TRY_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Head:
    """What a server says about a file: its size, its version, and whether it serves ranges."""

    size: int
    version: str  # ETag, or the time of the last change; empty: the server sends neither
    in_parts: bool


class Web:
    """Reads files over HTTP; every error is a sentence with the host and without the rest of the URL."""

    def __init__(self, headers: Mapping[str, str], *, public_only: bool = False) -> None:
        self._client = httpx.Client(
            transport=PublicTransport() if public_only else None,
            headers={"User-Agent": "slipway-runtime", **headers, "Accept-Encoding": "identity"},
            follow_redirects=True,
            timeout=TIMEOUT,
        )

    def head(self, url: str) -> Head | None:
        """Size and version of the file; None: the server has no such file."""
        with self._ask("GET", url, {"Range": "bytes=0-0"}, missing_is_fine=True) as answer:
            if answer.status_code == 404:
                return None
            size = answer.headers.get("Content-Length", "")
            in_parts = answer.status_code == 206
            if in_parts:
                size = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if answer.status_code == 416:
                size = "0"  # an empty file has no first byte
            if not size.isdecimal():
                raise FetchError(f"{urlsplit(url).netloc} does not say how long {_last(url)} is")
            return Head(int(size), _version(answer), in_parts)

    def read(self, url: str, start: int, end: int, version: str = "") -> Iterator[bytes]:
        """Bytes start … end of the file. With `version`, raise an error when the file has changed."""
        if start == end:
            return
        with self._ask("GET", url, {"Range": f"bytes={start}-{end - 1}"}) as answer:
            if version and _version(answer) not in {"", version}:
                raise FetchError(f"{urlsplit(url).netloc}: {_last(url)} was changed while it was fetched")
            skip = 0
            if answer.status_code == 206:
                if not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                    raise FetchError(f"{urlsplit(url).netloc} sent another part of {_last(url)} than requested")
            else:
                skip = start  # the server ignores ranges: skip the bytes that were read before
            left = end - start
            try:
                for piece in answer.iter_raw():
                    fresh = piece[skip:][:left]
                    skip = max(0, skip - len(piece))
                    left -= len(fresh)
                    if fresh:
                        yield fresh
                    if not left:
                        return
            except httpx.TransportError as error:
                raise Interrupted(describe_silence(urlsplit(url).netloc, error)) from error
        raise Interrupted("the file ended early")

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _ask(self, method: str, url: str, headers: dict[str, str], *, missing_is_fine: bool = False) -> "_Answer":
        return _Answer(self._client, method, url, headers, missing_is_fine)


class _Answer:
    """An HTTP response, open during the `with` block; error statuses become exceptions."""

    def __init__(
        self, client: httpx.Client, method: str, url: str, headers: dict[str, str], missing_is_fine: bool
    ) -> None:
        self._client = client
        self._request = client.build_request(method, url, headers=headers)
        self._host = urlsplit(url).netloc
        self._name = _last(url)
        self._missing_is_fine = missing_is_fine
        self._response: httpx.Response | None = None

    def __enter__(self) -> httpx.Response:
        try:
            self._response = self._client.send(self._request, stream=True)
        except httpx.TransportError as error:
            raise Interrupted(describe_silence(self._host, error)) from error
        except (httpx.InvalidURL, httpx.RequestError) as error:
            raise FetchError(f"{self._host} cannot be asked for {self._name}: {type(error).__name__}") from error
        status = self._response.status_code
        if status in {200, 206} or (self._missing_is_fine and status in {404, 416}):
            return self._response
        self._response.close()
        if status in _TRY_AGAIN:
            after = self._response.headers.get("Retry-After", "")
            raise Interrupted(f"status {status}", float(after) if after.isdecimal() else 0.0)
        if status in {401, 403}:
            raise AccessDeniedError(f"{self._host} refuses {self._name} with status {status}: check the credentials")
        if status in {404, 410}:
            raise ModelNotFoundError(f"{self._host} has no {self._name}")
        raise FetchError(f"{self._host} answers {status} for {self._name}")

    def __exit__(self, *_: object) -> None:
        if self._response is not None:
            self._response.close()


def _version(answer: httpx.Response) -> str:
    etag: str = answer.headers.get("ETag", "")
    return etag.removeprefix("W/") or str(answer.headers.get("Last-Modified", ""))


def _last(url: str) -> str:
    return urlsplit(url).path.rpartition("/")[2]


NAMES: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", INDEX, "model.safetensors", "adapter_config.json",
    "adapter_model.safetensors", SUMS,
)  # fmt: skip


class FolderSource:
    """A folder on a web server."""

    def __init__(self, url: str, bearer_token: str, *, public_only: bool = False) -> None:
        self.name = url.rstrip("/")
        self._url = url
        headers = {"Authorization": f"Bearer {bearer_token}"} if bearer_token else {}
        self._web = Web(headers, public_only=public_only)
        self._sums: dict[str, Checksum] = {}

    def listing(self) -> dict[str, RemoteFile]:
        """The files with usual names that exist."""
        found = self.about(NAMES)
        if not found:
            raise ModelNotFoundError(f"{urlsplit(self._url).netloc} has no model at {urlsplit(self._url).path}")
        if sums := found.pop(SUMS, None):
            self._sums = parse_sums(read_whole(self, sums))
        return {name: replace(file, checksum=self._sums.get(name)) for name, file in found.items()}

    def about(self, names: Collection[str]) -> dict[str, RemoteFile]:
        """The named files that exist. Requests the first byte of each: not every server answers HEAD, or in full."""
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="ask") as threads:
            heads = zip(names, threads.map(lambda name: self._web.head(self._url + quote(name)), names), strict=True)
            return {
                name: RemoteFile(
                    name=name,
                    size=head.size,
                    location=self._url + quote(name),
                    version=head.version,
                    checksum=self._sums.get(name),
                    in_parts=head.in_parts,
                )
                for name, head in heads
                if head is not None
            }

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """A range of a file; raises an error when the file has changed."""
        return self._web.read(file.location, start, end, file.version)

    def close(self) -> None:
        """Close all connections."""
        self._web.close()
