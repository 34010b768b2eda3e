"""Addresses (URIs) of models, and the endpoints and credentials with which they are read.

| address                      | where the files come from                                                  |
|------------------------------|----------------------------------------------------------------------------|
| `file:///path`, or a path    | that directory, as it is; `pvc://` arrives like this, mounted by the operator |
| `hf://organisation/name@rev` | the hub, or `HF_ENDPOINT`                                                  |
| `s3://bucket/prefix`         | the objects directly under the prefix; `AWS_ENDPOINT_URL` for other stores |
| `https://host/folder`        | a folder that serves `config.json` and its neighbours by their names       |

Endpoints and credentials are in the environment, which the operator fills from a Secret. Fields with secrets stay out
of `repr`, and nothing of them is ever logged.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from slipway_runtime.storage.source import FetchError

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
                raise FetchError(f"{shown(uri)} is not a local path: write file:///absolute/path")
            return LocalModel(Path(unquote(parts.path)))
        case "hf":
            repository, _, revision = uri.removeprefix("hf://").partition("@")
            if repository.count("/") != 1 or not all(repository.split("/")):
                raise FetchError(f"{shown(uri)} is not a repository: write hf://organisation/name@revision")
            return HubModel(repository, revision or None)
        case "s3":
            if not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
                raise FetchError(f"{shown(uri)} names no bucket: write s3://bucket/prefix")
            return S3Model(parts.netloc, parts.path.strip("/"))
        case "http" | "https":
            if "@" in parts.netloc or parts.query or parts.fragment or not parts.hostname:
                raise FetchError(
                    f"{shown(uri)} is not a plain folder: write {parts.scheme}://host/folder, and put credentials into "
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


@dataclass(frozen=True, kw_only=True)
class Access:
    """Endpoints and credentials; empty where the environment names none."""

    hub_endpoint: str = ""  # empty: the public hub
    hub_token: str = field(default="", repr=False)
    s3_endpoint: str = ""  # empty: AWS
    s3_region: str = ""
    s3_key: str = field(default="", repr=False)
    s3_secret: str = field(default="", repr=False)
    s3_session: str = field(default="", repr=False)
    bearer_token: str = field(default="", repr=False)  # for http(s), sent to `bearer_hosts` only
    bearer_hosts: frozenset[str] = frozenset()  # https://host or http://host, with :port where it is not the usual one
    anonymous: bool = False  # use no credentials, not even those of the machine
    public_only: bool = False  # refuse http(s) addresses of private networks, on redirects too

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Access":
        """Read the environment variables that the tools of each source use."""
        return cls(
            hub_endpoint=environment.get("HF_ENDPOINT", ""),
            hub_token=environment.get("HF_TOKEN", ""),
            s3_endpoint=environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", ""),
            s3_region=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION", ""),
            s3_key=environment.get("AWS_ACCESS_KEY_ID", ""),
            s3_secret=environment.get("AWS_SECRET_ACCESS_KEY", ""),
            s3_session=environment.get("AWS_SESSION_TOKEN", ""),
            bearer_token=environment.get("HTTP_BEARER_TOKEN", ""),
            bearer_hosts=frozenset(
                host if "://" in host else f"https://{host}"
                for part in environment.get("HTTP_BEARER_HOSTS", "").split(",")
                if (host := part.strip().rstrip("/"))
            ),
        )

    def with_hosts_of(self, *uris: str) -> "Access":
        """A copy that also sends the bearer token to the hosts of these http(s) addresses."""
        named = {_origin(uri) for uri in uris if uri.startswith(("http://", "https://"))}
        return replace(self, bearer_hosts=self.bearer_hosts | named)

    def without_credentials(self) -> "Access":
        """A copy that uses no credentials of any source, except the bearer token for hosts that are named for it."""
        return replace(self, hub_token="", s3_key="", s3_secret="", s3_session="", anonymous=True)

    def bearer_for(self, url: str) -> str:
        """The bearer token for the host of this URL; empty where the host is not in `bearer_hosts`.

        A host that is named for https gets no token over http, which everybody on the way can read.
        """
        return self.bearer_token if _origin(url) in self.bearer_hosts else ""


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def lies_under(uri: str, folders: Iterable[str]) -> bool:
    """Whether an address is one of these addresses, or lies in one that is a folder, a prefix or an organisation.

    hf://org holds each of its repositories, hf://org/name each of its revisions, s3://bucket/p and https://host/p
    everything below.
    """
    if any(part in {".", ".."} for part in unquote(uri).split("/")):
        return False  # a server may resolve them: then it would lie elsewhere
    plain = _without_revision(uri)
    return any(
        plain == folder or plain.startswith(folder + "/") for folder in map(_without_revision, folders) if folder
    )


def _without_revision(uri: str) -> str:
    return (uri.partition("@")[0] if uri.startswith("hf://") else uri).rstrip("/")
