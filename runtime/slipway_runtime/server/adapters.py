"""Which adapter a name means: the names are the API process's business, the engine knows digests of content.

| what happens                                | the name means                                             |
|---------------------------------------------|------------------------------------------------------------|
| load, first time                            | nothing yet (503), then the new content; failed: 503, why  |
| load, same content                          | what it meant: nothing happens                             |
| load, other content                         | the old content until the new one is loaded, then that     |
| load, other content, refused                | the old content, and the caller is told                    |
| unload                                      | nothing (404); requests that run finish first              |

Two names may mean the same content; it goes when the last one does. Everything runs on the event loop except the
fetching and hashing of files, which runs in threads.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import structlog

from slipway_api.runtime_api import AdapterInfo
from slipway_runtime.engine.client import Call, EngineDead
from slipway_runtime.messages import AdapterState, AdapterStatus, EngineFacts, LoadAdapter, Reply, UnloadAdapter
from slipway_runtime.models.adapter_files import AdapterRefusedError, adapter_digest, check_adapter_name
from slipway_runtime.server.errors import ApiError, unavailable
from slipway_runtime.storage.address import shown
from slipway_runtime.storage.errors import FetchError

log = structlog.get_logger()

MAX_NAMES: Final = 1024
SCHEMES: Final = ("hf", "s3", "http", "https", "pvc")  # beside file:// and plain paths, which must lie in the roots


class AdapterEngine(Protocol):
    """What the registry needs of the engine's client."""

    facts: EngineFacts
    adapters: tuple[AdapterStatus, ...]

    async def call(self, message: Call) -> Reply: ...  # noqa: D102  see EngineClient


class Base(Protocol):
    """What the registry needs to know of the base model."""

    @property
    def namespace(self) -> str: ...  # noqa: D102  see Identity
    def answers_to(self, name: str) -> bool: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What a name means."""

    name: str
    uri: str
    digest: str = ""
    state: AdapterState = AdapterState.LOADING
    error: str = ""
    pinned: bool = False


class AdapterRegistry:
    """The names of one loaded model's adapters."""

    def __init__(
        self,
        engine: AdapterEngine,
        base: Base,
        *,
        fetch: Callable[[str], Path],
        roots: Sequence[Path] = (),
        clock: Callable[[], float],
    ) -> None:
        """`fetch` brings what an address names to a local folder, and may block; `roots`: where local ones may lie."""
        self._engine = engine
        self._base = base
        self._fetch = fetch
        self._roots = tuple(roots)
        self._clock = clock
        self._named: dict[str, Adapter] = {}
        self._going: dict[str, tuple[Adapter, asyncio.Task[Reply]]] = {}  # by digest: being unloaded
        self._locks: dict[str, asyncio.Lock] = {}

    # --- asking

    def find(self, name: str) -> Adapter | None:
        """What the name means, with or without the namespace before it."""
        return self._named.get(name) or self._named.get(name.removeprefix(f"{self._base.namespace}/"))

    def names_of(self, digests: Sequence[str]) -> tuple[str, ...]:
        """The names that mean these contents: for metrics, where people look for names."""
        wanted = set(digests)
        return tuple(sorted(a.name for a in self._named.values() if a.digest in wanted))

    def all(self) -> list[Adapter]:
        """All adapters that have a name, in the order of their names."""
        return [self._named[name] for name in sorted(self._named)]

    def infos(self) -> list[AdapterInfo]:
        """All adapters as the admin port tells of them, those that are leaving included."""
        known = {status.digest: status for status in self._engine.adapters}
        leaving = [replace(adapter, state=AdapterState.DRAINING) for adapter, _ in self._going.values()]
        return [self._info(adapter, known.get(adapter.digest)) for adapter in [*self.all(), *leaving]]

    def info(self, name: str) -> AdapterInfo:
        """One of them; the name must be known."""
        adapter = self._named[name]
        return self._info(adapter, next((s for s in self._engine.adapters if s.digest == adapter.digest), None))

    def _info(self, adapter: Adapter, status: AdapterStatus | None) -> AdapterInfo:
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
        )

    # --- changing

    async def load(
        self, name: str, uri: str, *, digest: str = "", pinned: bool = False, replaces: bool = True
    ) -> Adapter:
        """Make the name mean this content; returns when requests for it are answered.

        Raises ApiError: 400 for what can never be (the name, the address, other content than `digest`, an adapter
        that the engine refuses), 404 where nothing is at the address, 409 for other content unless it `replaces`.
        """
        self._check(name)
        self._named.setdefault(name, Adapter(name=name, uri=uri, pinned=pinned))
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            before = self._named.get(name)
            if before is None:  # it was unloaded while this waited for its turn
                before = self._named[name] = Adapter(name=name, uri=uri, pinned=pinned)
            try:
                loaded = await self._load(before, Adapter(name=name, uri=uri, pinned=pinned), digest, replaces)
            except ApiError as refusal:
                if before.state is not AdapterState.HOST:
                    self._named[name] = Adapter(
                        name=name, uri=uri, pinned=pinned, state=AdapterState.FAILED, error=refusal.message
                    )
                log.info("adapter refused", adapter=name, reason=refusal.message)
                raise
            self._named[name] = loaded
        if before.digest and before.digest != loaded.digest:
            self._let_go(before)
        return loaded

    async def _load(self, before: Adapter, wanted: Adapter, expected: str, replaces: bool) -> Adapter:
        path, digest = await asyncio.to_thread(self._bring, wanted.uri)
        if expected and expected.removeprefix("sha256:") != digest.removeprefix("sha256:"):
            raise ApiError(400, "the adapter at this address has other content than the digest says", param="digest")
        is_same = before.state is AdapterState.HOST and before.digest == digest
        if is_same and before.pinned == wanted.pinned:
            return before
        if before.state is AdapterState.HOST and not is_same and not replaces:
            raise ApiError(
                409, f"the name {wanted.name} is taken by an adapter with other content; unload it first", param="name"
            )
        if (going := self._going.get(digest)) is not None:
            await asyncio.wait([going[1]])
        try:
            reply = await self._engine.call(LoadAdapter(call=0, digest=digest, path=str(path), pinned=wanted.pinned))
        except EngineDead:
            raise unavailable("the engine of this replica has stopped", retry_after_seconds=None) from None
        if reply.error:
            raise ApiError(400, f"the adapter cannot be used: {_without_paths(reply.error, path)}", param="lora_path")
        log.info("adapter loaded", adapter=wanted.name, digest=digest)
        return replace(wanted, digest=digest, state=AdapterState.HOST)

    def _bring(self, uri: str) -> tuple[Path, str]:
        """Where the files are on this machine, and their digest. Blocks; raises ApiError."""
        scheme = uri.split("://", 1)[0] if "://" in uri else ""
        try:
            if scheme in SCHEMES:
                path = self._fetch(uri)
                return path, adapter_digest(path)
            if scheme not in {"", "file"}:
                known = ", ".join(f"{each}://" for each in ("file", *SCHEMES))
                raise ApiError(400, f"the address begins with none of {known}", param="lora_path")
            path = Path(uri.removeprefix("file://"))
            if not path.is_absolute() or "\0" in uri:
                raise ApiError(400, "the path of an adapter is absolute", param="lora_path")
            if not self._roots:
                raise ApiError(400, "this server loads no adapters from local paths", param="lora_path")
            digest = adapter_digest(path, self._roots)
        except AdapterRefusedError as refusal:
            raise ApiError(
                400, _without_paths(str(refusal), Path(uri.removeprefix("file://"))), param="lora_path"
            ) from None
        except FetchError as error:
            raise ApiError(404, f"no adapter can be had from this address ({type(error).__name__})") from None
        except OSError:
            raise ApiError(404, "there is no adapter at this path", param="lora_path") from None
        return path, digest

    async def unload(self, name: str) -> asyncio.Task[Reply] | None:
        """Forget the name; the task is done when the content has left. None: another name still means it.

        Raises ApiError 404 for a name that nothing is known of.
        """
        adapter = self._named.get(name)
        if adapter is None:
            raise ApiError(404, "there is no adapter of that name", param="lora_name")
        async with self._locks.setdefault(name, asyncio.Lock()):
            adapter = self._named.pop(name, adapter)
        self._locks.pop(name, None)
        return self._let_go(adapter)

    def leaving(self, name: str) -> bool:
        """Whether content that had this name is still being unloaded."""
        return any(adapter.name == name for adapter, _ in self._going.values())

    def _let_go(self, adapter: Adapter) -> asyncio.Task[Reply] | None:
        if not adapter.digest or any(other.digest == adapter.digest for other in self._named.values()):
            return None
        task = asyncio.create_task(self._unload(adapter), name=f"unload {adapter.name}")
        self._going[adapter.digest] = (adapter, task)
        return task

    async def _unload(self, adapter: Adapter) -> Reply:
        try:
            return await self._engine.call(UnloadAdapter(call=0, digest=adapter.digest))
        except EngineDead:
            return Reply(call=0, error="the engine has stopped")
        finally:
            self._going.pop(adapter.digest, None)
            log.info("adapter unloaded", adapter=adapter.name, digest=adapter.digest)

    def _check(self, name: str) -> None:
        if not self._engine.facts.max_adapters:
            raise ApiError(400, "this server was started without adapters (--max-adapters)")
        try:
            check_adapter_name(name)
        except AdapterRefusedError as refusal:
            raise ApiError(400, str(refusal), param="lora_name") from None
        if self._base.answers_to(name):
            raise ApiError(400, "the base model has this name; an adapter needs another", param="lora_name")
        if name not in self._named and len(self._named) >= MAX_NAMES:
            raise ApiError(400, f"{MAX_NAMES} adapters have names; unload one first")


def adapter_roots(cache: Path, model: Path) -> tuple[Path, ...]:
    """Where local adapters may lie: the cache, what the operator mounts, and beside the model."""
    beside = (model.parent,) if model.parent != model.parent.parent else ()  # beside `/model` would be everywhere
    return (cache, Path("/mnt/slipway"), *beside)


def _without_paths(sentence: str, path: Path) -> str:
    """Where files lie on this machine is nobody's business outside."""
    for known in {str(path), str(path.resolve())} - {"/", "."}:
        sentence = sentence.replace(known, "it")
    return sentence
