"""Parses the address (URI) of a model.

| address                      | where the files come from                                                  |
|------------------------------|----------------------------------------------------------------------------|
| `file:///path`, or a path    | that directory, as it is; `pvc://` arrives like this, mounted by the operator |
| `hf://organisation/name@rev` | the hub, or `HF_ENDPOINT`                                                  |
| `s3://bucket/prefix`         | the objects directly under the prefix; `AWS_ENDPOINT_URL` for other stores |
| `https://host/folder`        | a folder that serves `config.json` and its neighbours by their names       |
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from slipway_runtime.storage.errors import FetchError

_UNREADABLE: Final = "an address that cannot be read"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class LocalModel:
    """`file://`: a local directory."""

    path: Path


@dataclass(frozen=True)
class HubModel:
    """`hf://`: a repository on the hub, at one revision."""

    repository: str
    revision: str | None  # None: the newest, which may change under a running service

    @property
    def is_pinned(self) -> bool:
        """Whether the address always names the same files: then the cache needs no request to the hub."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True)
class S3Model:
    """`s3://`: the objects directly under a prefix."""

    bucket: str
    prefix: str  # without slashes at its ends


@dataclass(frozen=True)
class WebModel:
    """`http(s)://`: a folder."""

    url: str  # with a slash at its end


Address = LocalModel | HubModel | S3Model | WebModel


def parse(uri: str) -> Address:
    """Parse an address; raises FetchError where it is not valid."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise FetchError(_UNREADABLE) from None
    if uri and not parts.scheme:
        return LocalModel(Path(uri).resolve())  # a relative path, as in: slipway-runtime serve models/tiny
    match parts.scheme:
        case "file":
            if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
                raise FetchError(f"{shown(uri)} is no local path: write file:///absolute/path")
            return LocalModel(Path(unquote(parts.path)))
        case "hf":
            repository, _, revision = uri.removeprefix("hf://").partition("@")
            if repository.count("/") != 1 or not all(repository.split("/")):
                raise FetchError(f"{shown(uri)} is no repository: write hf://organisation/name@revision")
            return HubModel(repository, revision or None)
        case "s3":
            if not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
                raise FetchError(f"{shown(uri)} names no bucket: write s3://bucket/prefix")
            return S3Model(parts.netloc, parts.path.strip("/"))
        case "http" | "https":
            if "@" in parts.netloc or parts.query or parts.fragment or not parts.hostname:
                raise FetchError(
                    f"{shown(uri)} is no plain folder: write {parts.scheme}://host/folder, and put credentials into "
                    "the Secret that credentialsSecretRef names"
                )
            return WebModel(uri.rstrip("/") + "/")
    raise FetchError(f"{shown(uri)} has an unknown scheme: file, hf, s3, http and https are supported")


def shown(uri: str) -> str:
    """The address for logs and errors, without the parts that may hold a password, a signature or a token."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return _UNREADABLE
    if parts.scheme not in {"http", "https", "s3"}:
        return uri
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
