"""Adapter registry: maps adapter names, known to the API server only, to the content digests that the engine knows.

| event                                       | the name then refers to                                    |
|---------------------------------------------|------------------------------------------------------------|
| load, first time                            | nothing yet (503), then the new content; on failure: 503   |
| load, same content                          | the same content: nothing changes                          |
| load, other content                         | the old content until the new content is loaded            |
| load, other content, refused                | the old content; the caller gets the error                 |
| unload                                      | nothing (404); requests that run finish first              |

Two names may refer to the same content, which is unloaded with the last of them. Fetched files stay in the node's cache
while the engine knows the content, because it may read them again; afterwards, or after a refusal, they may be evicted.
The registry runs on the event loop; files are fetched and hashed in threads.

Files of adapters are fetched from their address, and released in the cache:

| address                                      | where the files are                                             |
|----------------------------------------------|-----------------------------------------------------------------|
| `file:///path`, `/path`                      | at that path, which must be inside one of the roots             |
| `hf://`, `s3://`, `http(s)://`, `pvc://`     | in the node's cache, not evicted before `release` |
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakValueDictionary

import structlog

from slipway_api.adapter_conditions import AdapterReason
from slipway_api.runtime_api import AdapterInfo
from slipway_runtime.engine.client import EngineClient, EngineDead
from slipway_runtime.messages import ADAPTERS_MAY_TAKE, AdapterState, AdapterStatus, LoadAdapter, Reply, UnloadAdapter
from slipway_runtime.models.adapter_files import (
    NO_ROOM_FOR_EXPERTS,
    AdapterNotFoundError,
    AdapterRefusedError,
    adapter_digest,
    check_adapter_name,
    read_adapter_config,
)
from slipway_runtime.server.errors import ApiError, unavailable
from slipway_runtime.storage.address import shown
from slipway_runtime.storage.source import AccessDeniedError, FetchError

SCHEMES: Final = ("hf", "s3", "http", "https", "pvc")  # beside file:// and plain paths


@dataclass(frozen=True)
class FetchedAdapter:
    """An adapter's files on this machine."""

    path: Path
    digest: str
    is_fetched: bool


class AdapterSource:
    """Fetches adapters; its methods block, and are safe to call from any thread."""

    def __init__(
        self,
        fetch: Callable[[str, bool, Mapping[str, str]], Path],
        release: Callable[[Path], None],
        *,
        roots: Sequence[Path] = (),
    ) -> None:
        """fetch: (address, whether a client named it, extra credentials) -> the folder, which stays until `release`.

        roots: the folders in which local adapters may be.
        """
        self._fetch = fetch
        self._release = release
        self._roots = tuple(roots)

    def fetch(
        self, uri: str, *, from_client: bool = False, credentials: Mapping[str, str] | None = None
    ) -> FetchedAdapter:
        """Fetch the files and compute their digest; the caller releases each result once. Raises ApiError."""
        try:
            if "://" not in uri or uri.startswith("file://"):
                path = self._local(uri)
                return FetchedAdapter(path, adapter_digest(path, self._roots), is_fetched=False)
            if uri.partition("://")[0] not in SCHEMES:
                known = ", ".join(f"{each}://" for each in ("file", *SCHEMES))
                raise ApiError(400, f"the address starts with none of {known}", param="lora_path")
            path = self._fetch(uri, from_client, credentials or {})
            try:
                return FetchedAdapter(path, adapter_digest(path), is_fetched=True)
            except (AdapterRefusedError, OSError):
                self._release(path)
                raise
        except AdapterRefusedError as refusal:
            sentence = redact_paths(str(refusal), Path(uri.removeprefix("file://")))
            is_missing = isinstance(refusal, AdapterNotFoundError)
            reason = AdapterReason.DOWNLOAD_FAILED if is_missing else AdapterReason.ENGINE_REJECTED
            raise ApiError(400, sentence, param="lora_path", reason=reason) from None
        except FetchError as error:
            denied = isinstance(error, AccessDeniedError)
            reason = AdapterReason.CREDENTIALS_INVALID if denied else AdapterReason.DOWNLOAD_FAILED
            sentence = f"no adapter can be had from this address ({type(error).__name__})"
            raise ApiError(404, sentence, reason=reason) from None
        except OSError:
            sentence = "there is no adapter at this path"
            raise ApiError(404, sentence, param="lora_path", reason=AdapterReason.DOWNLOAD_FAILED) from None

    def release(self, fetched: FetchedAdapter) -> None:
        """Release fetched files: the cache may evict them unless another adapter holds them."""
        if fetched.is_fetched:
            self._release(fetched.path)

    def _local(self, uri: str) -> Path:
        path = Path(uri.removeprefix("file://"))
        if not path.is_absolute() or "\0" in uri:
            raise ApiError(400, "the path of an adapter is absolute", param="lora_path")
        if not self._roots:
            raise ApiError(400, "this server loads no adapters from local paths", param="lora_path")
        return path


def adapter_roots(cache: Path, model: Path, named: Iterable[str] = ()) -> tuple[Path, ...]:
    """The allowed folders of local adapters: the cache, the operator's mounts, and the parent folder of the model.

    `named`: addresses on the command line. Whoever starts the process may load from any folder.
    """
    beside = (model.parent,) if model.parent != model.parent.parent else ()  # never `/`, the parent of `/model`
    typed = [Path(uri.removeprefix("file://")) for uri in named if uri.startswith(("file://", "/"))]
    return (cache, Path("/mnt/slipway"), *beside, *typed)


def redact_paths(sentence: str, path: Path) -> str:
    """Remove local paths from an error message for a client."""
    for known in {str(path), str(path.resolve())} - {"/", "."}:
        sentence = sentence.replace(known, "it")
    return sentence


log = structlog.get_logger()

MAX_NAMES: Final = 1024
FETCH_THREADS: Final = 4
FETCH_SECONDS: Final = 1800.0  # for one adapter; the largest takes minutes


class Base(Protocol):
    """The names of the base model."""

    @property
    def namespace(self) -> str:
        """The namespace of its service."""

    def answers_to(self, name: str) -> bool:
        """Whether `name` names the base model."""


@dataclass(frozen=True, kw_only=True)
class NamedAdapter:
    """The adapter of a name: its address, digest and state."""

    name: str
    uri: str
    digest: str = ""
    state: AdapterState = AdapterState.LOADING
    error: str = ""
    reason: str = ""  # of the error, in one word
    pinned: bool = False
    version: str = ""  # from the load request


class AdapterRegistry:
    """The names of one loaded model's adapters."""

    def __init__(
        self,
        engine: EngineClient,
        base: Base,
        *,
        source: AdapterSource,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._base = base
        self._source = source
        self._clock = clock
        # Threads of their own: slow hosts must not stop the other work of threads, nor clients' loads the operator's.
        self._threads = ThreadPoolExecutor(FETCH_THREADS, "adapter")
        self._client_threads = ThreadPoolExecutor(FETCH_THREADS, "client adapter")
        self._named: dict[str, NamedAdapter] = {}
        self._going: dict[str, tuple[NamedAdapter, asyncio.Task[Reply]]] = {}  # by digest: being unloaded
        # By name, while a load holds it or waits for it, so a name never has two.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._contents: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by digest, while in use
        self._fetched: dict[
            str, list[FetchedAdapter]
        ] = {}  # by digest: to release when the engine has unloaded the content

    # --- queries

    def find(self, name: str) -> NamedAdapter | None:
        """The adapter of a name, given with or without the namespace before it."""
        return self._named.get(name) or self._named.get(name.removeprefix(f"{self._base.namespace}/"))

    def names_of(self, digests: Sequence[str]) -> tuple[str, ...]:
        """The names of the adapters with these digests: metrics show names."""
        wanted = set(digests)
        return tuple(sorted(a.name for a in self._named.values() if a.digest in wanted))

    def all(self) -> list[NamedAdapter]:
        """All adapters that have a name, in the order of their names."""
        return [self._named[name] for name in sorted(self._named)]

    def infos(self) -> list[AdapterInfo]:
        """All adapters for the admin port, including those that are being unloaded."""
        known = {status.digest: status for status in self._engine.adapters}
        leaving = [replace(adapter, state=AdapterState.DRAINING) for adapter, _ in self._going.values()]
        return [self._info(adapter, known.get(adapter.digest)) for adapter in [*self.all(), *leaving]]

    def info(self, name: str) -> AdapterInfo:
        """The AdapterInfo of one name, which must be known."""
        adapter = self._named[name]
        return self._info(adapter, next((s for s in self._engine.adapters if s.digest == adapter.digest), None))

    def _info(self, adapter: NamedAdapter, status: AdapterStatus | None) -> AdapterInfo:
        state = adapter.state
        if status is not None and state is AdapterState.HOST:
            state = status.state
        return AdapterInfo(
            name=adapter.name,
            digest=adapter.digest,
            uri=shown(adapter.uri),
            state=str(state),
            bytes=status.bytes if status else 0,
            rank=status.rank if status else 0,
            requests=status.requests if status else 0,
            pinned=adapter.pinned,
            idle_seconds=round(self._clock() - status.last_used, 3) if status and status.last_used else None,
            message=adapter.error,
            reason=adapter.reason,
            version=adapter.version,
        )

    # --- load and unload

    async def load(
        self,
        name: str,
        uri: str,
        *,
        digest: str = "",
        pinned: bool = False,
        version: str = "",
        credentials: Mapping[str, str] | None = None,
        replaces: bool = True,
        from_client: bool = False,
    ) -> NamedAdapter:
        """Load the adapter under this name; returns when requests for it are answered. `version` is only reported back.

        Raises ApiError: 400 for an invalid name or address, content with another digest than `digest`, or an adapter
        that the engine refuses; 404 where the address has no adapter; 409 for other content unless `replaces`.
        """
        self._check(name)
        wanted = NamedAdapter(name=name, uri=uri, pinned=pinned, version=version)
        self._named.setdefault(name, wanted)
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            before = self._named.get(name)
            if before is None:  # the adapter was unloaded while this call waited for the lock
                before = self._named[name] = wanted
            try:
                fetched = await self._fetch(uri, from_client, credentials)
                loaded = await self._load(before, wanted, fetched, digest, replaces)
            except ApiError as refusal:
                if before.state is not AdapterState.HOST:
                    self._named[name] = replace(
                        wanted, state=AdapterState.FAILED, error=refusal.message, reason=refusal.reason
                    )
                log.warning("adapter not loaded", adapter=name, uri=shown(uri), reason=refusal.message)
                raise
            self._named[name] = loaded
        if before.digest and before.digest != loaded.digest:
            self._unload_unnamed(before)
        return loaded

    async def _fetch(self, uri: str, from_client: bool, credentials: Mapping[str, str] | None) -> FetchedAdapter:
        """Fetch the adapter on a thread for such work; raises ApiError, also when it takes too long."""
        threads = self._client_threads if from_client else self._threads
        work = partial(self._source.fetch, uri, from_client=from_client, credentials=credentials)
        fetching = asyncio.get_running_loop().run_in_executor(threads, work)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await asyncio.shield(fetching)
        except (TimeoutError, asyncio.CancelledError) as error:
            fetching.add_done_callback(self._release_late)
            if isinstance(error, asyncio.CancelledError):
                raise
            sentence = f"the adapter did not come from this address within {FETCH_SECONDS:g} s"
            raise ApiError(404, sentence, reason=AdapterReason.DOWNLOAD_FAILED) from None

    def _release_late(self, fetching: "asyncio.Future[FetchedAdapter]") -> None:
        """Release an adapter that came when nobody waited for it any more."""
        if not fetching.cancelled() and fetching.exception() is None:
            self._threads.submit(self._source.release, fetching.result())

    async def _load(
        self, before: NamedAdapter, wanted: NamedAdapter, fetched: FetchedAdapter, expected: str, replaces: bool
    ) -> NamedAdapter:
        digest, keeps = fetched.digest, False
        try:
            if expected and expected.removeprefix("sha256:") != digest.removeprefix("sha256:"):
                sentence = "the adapter at this address has other content than the digest says"
                raise ApiError(400, sentence, param="digest", reason=AdapterReason.DIGEST_MISMATCH)
            await asyncio.to_thread(self._check_rank, fetched)
            is_same = before.state is AdapterState.HOST and before.digest == digest
            if is_same and before.pinned == wanted.pinned:
                return replace(before, uri=wanted.uri, version=wanted.version)
            if before.state is AdapterState.HOST and not is_same and not replaces:
                sentence = f"the name {wanted.name} is taken by an adapter with other content; unload it first"
                raise ApiError(409, sentence, param="name")
            async with self._contents.setdefault(digest, asyncio.Lock()):  # after a running unload of it
                await self._hand_over(fetched, pinned=wanted.pinned)
            keeps = True
        finally:
            if keeps:
                self._fetched.setdefault(digest, []).append(fetched)
            else:
                await asyncio.to_thread(self._source.release, fetched)
        log.info("adapter loaded", adapter=wanted.name, digest=digest)
        return replace(wanted, digest=digest, state=AdapterState.HOST)

    async def _hand_over(self, fetched: FetchedAdapter, *, pinned: bool) -> None:
        """Let the engine load the adapter. Raises ApiError."""
        message = LoadAdapter(call=0, digest=fetched.digest, path=str(fetched.path), pinned=pinned)
        try:
            reply = await self._engine.call(message)
        except EngineDead:
            raise unavailable("the engine of this replica has stopped", retry_after_seconds=None) from None
        if reply.error:
            await self._forget_rejected(fetched.digest)
            sentence = f"the adapter cannot be used: {redact_paths(reply.error, fetched.path)}"
            is_too_large = ADAPTERS_MAY_TAKE in reply.error or NO_ROOM_FOR_EXPERTS in reply.error
            reason = AdapterReason.CAPACITY_EXCEEDED if is_too_large else AdapterReason.ENGINE_REJECTED
            raise ApiError(400, sentence, param="lora_path", reason=reason)

    async def _forget_rejected(self, digest: str) -> None:
        """Let the engine forget content that it rejected: no name has it, so no unload would follow."""
        if not self._is_named(digest):
            with contextlib.suppress(EngineDead):
                await self._engine.call(UnloadAdapter(call=0, digest=digest))

    def _check_rank(self, fetched: FetchedAdapter) -> None:
        """Refuse a rank above the engine's limit before the weights are read. Raises ApiError."""
        try:
            rank = read_adapter_config(fetched.path).max_rank
        except (AdapterRefusedError, OSError):
            return  # the engine reads the config too, and reports the error
        most = self._engine.facts.max_rank
        if most and rank > most:
            sentence = f"the adapter has rank {rank}; this server holds ranks up to {most} (--max-rank)"
            raise ApiError(400, sentence, param="lora_path", reason=AdapterReason.RANK_TOO_LARGE)

    async def unload(self, name: str) -> asyncio.Task[Reply] | None:
        """Remove the name; the task ends when the engine has unloaded the content. None: another name refers to it.

        Raises ApiError 404 for an unknown name.
        """
        adapter = self._named.get(name)
        if adapter is None:
            raise ApiError(404, "there is no adapter of that name", param="lora_name")
        async with self._locks.setdefault(name, asyncio.Lock()):
            adapter = self._named.pop(name, adapter)
        return self._unload_unnamed(adapter)

    def leaving(self, name: str) -> bool:
        """Whether content that had this name is still being unloaded."""
        return any(adapter.name == name for adapter, _ in self._going.values())

    def _unload_unnamed(self, adapter: NamedAdapter) -> asyncio.Task[Reply] | None:
        if not adapter.digest or self._is_named(adapter.digest):
            return None
        task = asyncio.create_task(self._unload(adapter), name=f"unload {adapter.name}")
        self._going[adapter.digest] = (adapter, task)
        return task

    async def _unload(self, adapter: NamedAdapter) -> Reply:
        try:
            async with self._contents.setdefault(adapter.digest, asyncio.Lock()):
                if self._is_named(adapter.digest):  # the content was loaded under another name meanwhile
                    return Reply(call=0)
                reply = await self._engine.call(UnloadAdapter(call=0, digest=adapter.digest))
                for fetched in self._fetched.pop(adapter.digest, ()):
                    await asyncio.to_thread(self._source.release, fetched)
                log.info("adapter unloaded", adapter=adapter.name, digest=adapter.digest)
                return reply
        except EngineDead:
            return Reply(call=0, error="the engine has stopped")
        finally:
            self._going.pop(adapter.digest, None)

    def _is_named(self, digest: str) -> bool:
        return any(adapter.digest == digest for adapter in self._named.values())

    def _check(self, name: str) -> None:
        if not self._engine.facts.max_adapters:
            sentence = "this server was started without adapters (--max-adapters)"
            raise ApiError(400, sentence, reason=AdapterReason.CAPACITY_EXCEEDED)
        try:
            check_adapter_name(name)
        except AdapterRefusedError as refusal:
            raise ApiError(400, str(refusal), param="lora_name") from None
        if self._base.answers_to(name):
            raise ApiError(400, "the base model has this name; an adapter needs another", param="lora_name")
        if name not in self._named and len(self._named) >= MAX_NAMES:
            sentence = f"{MAX_NAMES} adapters have names; unload one first"
            raise ApiError(400, sentence, reason=AdapterReason.CAPACITY_EXCEEDED)
