"""Fetches the model or adapter at an address into a directory, and checks its files.

| address                      | where the files come from                                                     |
|------------------------------|-------------------------------------------------------------------------------|
| `file:///path`               | that directory, as it is; claims (`pvc://`) are mounted and arrive like this  |
| `hf://organisation/name@rev` | the hub (or `HF_ENDPOINT`)                                                    |
| `s3://bucket/prefix`         | AWS, or the store behind `AWS_ENDPOINT_URL`                                   |
| `https://host/folder`        | a web server; `HTTP_BEARER_TOKEN` is sent to hosts that are named for it only |

The digest of weights is `sha256:` and the SHA-256 of `model.safetensors`; for several files, the SHA-256 of the output
of `sha256sum *.safetensors`.
"""

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from slipway_api.types import parse_quantity
from slipway_runtime.storage.address import Access, Address, HubModel, LocalModel, S3Model, WebModel, parse, shown
from slipway_runtime.storage.cache import Cache, content_key, manifest
from slipway_runtime.storage.download import OnProgress, download_files
from slipway_runtime.storage.source import (
    AccessDeniedError,
    FetchError,
    ModelNotFoundError,
    OutOfSpaceError,
    RemoteFile,
    RetryPolicy,
    Source,
    UnreachableError,
    choose,
)

__all__ = [
    "Access", "AccessDeniedError", "FetchError", "HubModel", "LocalModel", "ModelNotFoundError", "RetryPolicy",
    "S3Model", "UnreachableError", "WebModel", "check_digest", "fetch", "parse", "release", "shown", "weights_digest",
]  # fmt: skip

log = structlog.get_logger()

TELL_EVERY: Final = 10.0  # seconds between two log lines about a download


def fetch(
    uri: str,
    *,
    cache: Path,
    weights: bool = True,
    endpoint: str | None = None,
    access: Access | None = None,
    limit_bytes: int | None = None,
    at_most_bytes: int = 0,
    at_most_seconds: float = math.inf,
    on_progress: OnProgress | None = None,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008  frozen
) -> Path:
    """Fetch the model at the address, and return its directory. Blocks; safe to repeat and to kill.

    weights: False fetches only the files beside the weights, such as a tokenizer.
    endpoint: the URL of another hub.
    access: endpoints and credentials; by default those of the environment, with the bearer token for this address.
    limit_bytes: size limit of the cache, 0 for no limit; by default SLIPWAY_CACHE_LIMIT, such as 200Gi.
    at_most_bytes: refuse anything larger, such as an oversized adapter that a client names.
    at_most_seconds: give up a download that takes longer.
    on_progress: called with the bytes fetched and the bytes in all, never by two threads at once.
    Raises FetchError, a sentence for the user.

    The directory stays in the cache until this process ends, or has called `release` as often as `fetch`.
    """
    address = parse(uri)
    if isinstance(address, LocalModel):
        if not address.path.is_dir():
            raise ModelNotFoundError(f"{uri}: there is no directory {address.path}")
        return address.path
    access = access or Access.of(os.environ).with_hosts_of(uri)
    if limit_bytes is None:
        limit_bytes = int(parse_quantity(os.environ.get("SLIPWAY_CACHE_LIMIT") or 0))
    try:
        model_cache = Cache(cache, limit_bytes)
        return _fetch(
            address,
            uri,
            model_cache,
            access,
            endpoint,
            weights,
            at_most_bytes,
            _limited(on_progress or _log_progress(uri), at_most_seconds, shown(uri)),
            retry,
        )
    except OSError as error:
        raise FetchError(f"{shown(uri)}: the cache cannot be written: {error.strerror}") from error


def release(directory: Path, *, cache: Path) -> None:
    """Release a fetched directory: when no process uses it, the cache may evict it."""
    Cache(cache).release(directory)


def _fetch(
    address: Address,
    uri: str,
    model_cache: Cache,
    access: Access,
    endpoint: str | None,
    weights: bool,
    at_most_bytes: int,
    on_progress: OnProgress,
    retry: RetryPolicy,
) -> Path:
    # What was read with credentials is not remembered for those who have none.
    reader = " without credentials" if access.anonymous else ""
    wanted = f"{uri} {endpoint or access.hub_endpoint} {'model' if weights else 'tokenizer'}{reader}"
    last = model_cache.remembered(wanted)
    if last and isinstance(address, HubModel) and address.is_pinned and (held := model_cache.hold(last)):
        return held  # a commit never changes: no network is needed
    with _source(address, access, endpoint) as source:
        try:
            files = retry.call(lambda: choose(source, weights=weights), source.name, time.sleep)
        except UnreachableError as error:
            if last and (held := model_cache.hold(last)):
                log.warning("the source does not answer; using what it had last", model=shown(uri), reason=str(error))
                return held
            raise
        size = sum(file.size for file in files)
        if at_most_bytes and size > at_most_bytes:
            raise OutOfSpaceError(f"{source.name} has {size} bytes, more than the {at_most_bytes} that are allowed")
        key = content_key(files)
        held = model_cache.hold(key)
        while held is None:  # a second round only where another process evicts the model between the two locks
            _download_into_cache(source, files, key, model_cache, on_progress, retry)
            held = model_cache.hold(key)
    model_cache.remember(wanted, key)
    return held


def _download_into_cache(
    source: Source,
    files: Sequence[RemoteFile],
    key: str,
    model_cache: Cache,
    on_progress: OnProgress,
    retry: RetryPolicy,
) -> None:
    with model_cache.coming(key) as folder:
        if folder is None:
            return
        model_cache.link_known(files, folder)
        new = [file for file in files if not (folder / file.name).exists()]
        begun = {file.name: _blocks(folder / f"{file.name}.part") for file in new}
        model_cache.make_room(
            sum(file.size for file in new if begun[file.name] is None),
            sum(max(0, file.size - (begun[file.name] or 0)) for file in new),
            key,
        )
        sums = download_files(source, files, folder, on_progress=on_progress, retry=retry)
        model_cache.finish(key, source.name, files, sums)


def _blocks(path: Path) -> int | None:
    """Bytes of a file that the disk holds, without its holes; None: there is no file."""
    return path.stat().st_blocks * 512 if path.exists() else None


@contextlib.contextmanager
def _source(address: Address, access: Access, endpoint: str | None) -> Iterator[Source]:
    # Each source imports its library here: they cost half a second, and most replicas need none or one.
    source: Source
    match address:
        case HubModel():
            from slipway_runtime.storage.hub import HubSource

            source = HubSource(address, endpoint or access.hub_endpoint, access.hub_token, anonymous=access.anonymous)
        case S3Model():
            from slipway_runtime.storage.s3 import S3Source

            source = S3Source(address, access)
        case WebModel(url):
            from slipway_runtime.storage.web import FolderSource

            source = FolderSource(url, access.bearer_for(url), public_only=access.public_only)
        case LocalModel():
            raise AssertionError("a local model needs no source")
    try:
        yield source
    finally:
        source.close()


def _limited(on_progress: OnProgress, seconds: float, name: str) -> OnProgress:
    """The same callback, which ends the download after so many seconds: a slow source would keep a thread for ever."""
    ends = time.monotonic() + seconds

    def tell(done: int, total: int) -> None:
        if time.monotonic() > ends:
            raise FetchError(f"{name}: {done} of {total} bytes came in {seconds:g} s; that is too slow")
        on_progress(done, total)

    return tell


def _log_progress(uri: str) -> OnProgress:
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            log.info("fetching", model=shown(uri), bytes=done, of=total)

    return tell


def weights_digest(directory: Path, cache: Path | None = None) -> str:
    """`sha256:…` of the weights, as the module says. Reads all of them, unless the download to `cache` computed it.

    Stored sums are used from the cache only: a list of sums beside other weights may be forged.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FetchError(f"{directory} has no *.safetensors")
    known = manifest(directory) if cache is not None and directory.parent == cache / "models" else {}
    sums = [(str(known[file.name]["sha256"]) if file.name in known else _sha256(file), file.name) for file in files]
    if len(sums) == 1:
        return f"sha256:{sums[0][0]}"
    listing = "".join(f"{digest}  {name}\n" for digest, name in sums)
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def check_digest(directory: Path, expected: str, cache: Path | None = None) -> None:
    """Refuse weights whose digest is not the expected one."""
    found = weights_digest(directory, cache)
    if found != expected.lower():
        raise FetchError(f"the weights have the digest {found}, the service was made for {expected}: refusing to start")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
