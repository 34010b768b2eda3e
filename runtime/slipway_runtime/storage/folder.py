"""`http(s)://host/folder`: a folder on a web server, which lists nothing: each usual file name is requested.

The folder holds what a checkpoint's folder holds: `config.json`, `tokenizer.json` and `model.safetensors`, or
`model.safetensors.index.json` and its shards; an adapter's `adapter_config.json` and `adapter_model.safetensors`
likewise. With a `SHA256SUMS` beside them every file is checked.
"""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final
from urllib.parse import quote, urlsplit

from slipway_runtime.storage.errors import ModelNotFoundError
from slipway_runtime.storage.source import INDEX, SUMS, Checksum, RemoteFile, parse_sums, read_whole
from slipway_runtime.storage.web import Web

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
