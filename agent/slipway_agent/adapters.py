"""LoRA adapters of the engine: loaded, unloaded and listed by the calls that the dialect names.

The engine's own list decides which adapters are loaded. The agent remembers only facts that the list lacks: the version
and the pin of a load, loads that run, and why one failed. After a restart of the agent, an adapter of the same address
is taken over as it is.

| address            | the engine is given                                      |
|--------------------|----------------------------------------------------------|
| `file:///a/b`      | `/a/b`, a path that its own container must have          |
| `hf://org/name`    | `org/name`, which it downloads with its own credentials  |
| any other          | nothing: refused in one sentence                         |

The agent sees no content. It refuses a load that names a digest, and reports a digest of the address, with the prefix
`source:`. An address that the engine has loaded is not loaded again: vLLM would answer from cached blocks that
the old content has computed. New content needs a new address.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog

from slipway_agent.engine import Engine, EngineClosed, EngineError, EngineRefused, EngineUnreadable
from slipway_agent.refusal import Refusal, refused_by_engine, unavailable
from slipway_api.adapter_conditions import AdapterReason
from slipway_api.dialect import AdapterSource, Dialect, EngineAdapters
from slipway_api.runtime_api import AdapterInfo, LoadAdapterRequest

log = structlog.get_logger()

ANSWER_SECONDS: Final = 0.2  # a load or an unload that takes longer answers 202, and continues
MOST_NAMES: Final = 1024
MOST_LOADS: Final = 4  # at the same time
MOST_WAITING_LOADS: Final = 64
_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
LOADING, LOADED, FAILED = "loading", "host", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The agent's record of one adapter."""

    name: str
    uri: str
    version: str = ""
    pinned: bool = False
    state: str = LOADING
    message: str = ""
    reason: str = ""

    @property
    def digest(self) -> str:
        """Identifies the content by its address: another address counts as other content."""
        return "source:" + hashlib.sha256(self.uri.encode()).hexdigest()

    def is_same(self, asked: LoadAdapterRequest) -> bool:
        """Whether a load request names the known source, version and pin."""
        return (self.uri, self.version, self.pinned) == (asked.uri, asked.version, asked.pinned)


@dataclass(frozen=True, slots=True)
class Listing:
    """The engine's list of models: its first model, and its adapters with their sources."""

    model: Mapping[str, Any]
    adapters: Mapping[str, str]


@dataclass(slots=True)
class _Line:
    """Whoever changes the adapter of a name waits here."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Adapters:
    """The adapters of one engine. Methods raise Refusal."""

    def __init__(self, dialect: Dialect, engine: Engine, *, most: int | None = None) -> None:
        """most: adapters that compute at the same time, as the engine was started; None: as the dialect says."""
        self._dialect = dialect
        self._engine = engine
        self._calls = dialect.adapters
        default = (self._calls.max_adapters or 1) if self._calls is not None else 0
        self.most = (default if most is None else most) if self._calls is not None else 0
        self._known: dict[str, Known] = {}
        self._lines: dict[str, _Line] = {}
        self._leaving: set[str] = set()
        self._slots = asyncio.Semaphore(MOST_LOADS)
        self._tasks: set[asyncio.Task[None]] = set()

    def forget(self) -> None:
        """The engine has begun anew, without any adapter."""
        for task in self._tasks:
            task.cancel()
        self._known.clear()
        self._leaving.clear()

    async def stop(self) -> None:
        """Cancel the background tasks."""
        self.forget()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- queries

    async def listing(self) -> Listing:
        """The engine's list of models and adapters; raises EngineError."""
        models = self._dialect.models
        answer = await self._engine.get(models.path, seconds=self._dialect.probe.timeout_seconds)
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list) or len(entries) > 2 * MOST_NAMES:
            raise EngineUnreadable(f"GET {models.path}: the answer is not a list of models")
        model: Mapping[str, Any] = {}
        adapters: dict[str, str] = {}
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
                raise EngineUnreadable(f"GET {models.path}: an entry has no id")
            if entry.get(models.parent_field):
                adapters[entry["id"]] = str(entry.get(models.source_field) or "")
            elif not model:
                model = entry
        return Listing(model, adapters)

    async def infos(self) -> list[AdapterInfo]:
        """All adapters, with those that load and those that failed."""
        if self._calls is None:
            return []
        try:
            loaded = (await self.listing()).adapters
        except EngineError as error:
            raise unavailable(error) from None
        unlisted = {name: known for name, known in self._known.items() if name not in loaded and known.state != LOADED}
        return [
            *(_info(self._as_loaded(name, source), name in self._leaving) for name, source in sorted(loaded.items())),
            *(_info(unlisted[name]) for name in sorted(unlisted)),
        ]

    def _as_loaded(self, name: str, source: str) -> Known:
        """An adapter that the engine lists: the old one, while another loads in its place or could not be loaded."""
        known = self._known.get(name)
        if known is not None and _is_source(known.uri, source):
            return replace(known, state=LOADED, message="", reason="")
        return Known(name=name, uri=_address(source), state=LOADED)

    # --- load and unload

    async def load(
        self, asked: LoadAdapterRequest, *, seconds: float | None = ANSWER_SECONDS
    ) -> tuple[AdapterInfo, bool]:
        """Load an adapter under its name: how it is after so long, None: at the end, and whether the load is over."""
        calls = self._checked(asked)
        source = self._source(calls, asked)
        known = self._known.get(asked.name)
        if known is not None and known.state == LOADING and known.is_same(asked):
            return _info(known), False
        if known is None and len(self._known) >= MOST_NAMES:
            raise Refusal(400, f"{MOST_NAMES} adapters have names already", reason=AdapterReason.CAPACITY_EXCEEDED)
        if len(self._tasks) >= MOST_WAITING_LOADS:
            raise Refusal(503, f"{MOST_WAITING_LOADS} loads and unloads wait already")
        task = self._start(asked.name, lambda: self._load(calls, asked, source))
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return _info(Known(name=asked.name, uri=asked.uri, version=asked.version, pinned=asked.pinned)), False
        if task.cancelled():
            raise Refusal(503, "the engine has started again")
        if (error := task.exception()) is not None:
            raise error
        return _info(self._known.get(asked.name, Known(name=asked.name, uri=asked.uri, state=LOADED))), True

    async def unload(self, name: str) -> bool:
        """Unload an adapter: whether it is gone, or was never there; False: that takes longer."""
        if self._calls is None:
            return True
        calls = self._calls
        self._leaving.add(name)
        task = self._start(name, lambda: self._unload(calls, name))
        await asyncio.wait([task], timeout=ANSWER_SECONDS)
        if not task.done():
            return False
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        return True

    def _start(self, name: str, change: Callable[[], Any]) -> asyncio.Task[None]:
        async def in_line() -> None:
            line = self._lines.setdefault(name, _Line())
            line.users += 1
            try:
                async with line.lock, self._slots:
                    await change()
            finally:
                line.users -= 1
                if not line.users:
                    del self._lines[name]

        task = asyncio.create_task(in_line())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refusal):
            log.error("adapter", error=type(error).__name__)

    async def _load(self, calls: EngineAdapters, asked: LoadAdapterRequest, source: str) -> None:
        before = self._known.get(asked.name)
        fresh = Known(name=asked.name, uri=asked.uri, version=asked.version, pinned=asked.pinned)
        try:
            listing = await self.listing()
            loaded = listing.adapters.get(asked.name)
            if loaded is not None and _is_taken_over(before, asked, loaded, source):
                self._known[asked.name] = replace(fresh, state=LOADED)
                return
            self._known[asked.name] = fresh
            if loaded is not None and not (calls.load.replace_field and loaded != source):
                await self._post_unload(calls, asked.name)
                loaded = None
            body: dict[str, Any] = {calls.load.name_field: asked.name, calls.load.source_field: source}
            if loaded is not None:
                body[calls.load.replace_field] = True
            if calls.load.pinned_field and asked.pinned:
                body[calls.load.pinned_field] = True
            await self._engine.post(calls.load.path, body, seconds=calls.load_seconds)
        except EngineRefused as error:
            raise self._failed(fresh, _load_refusal(self._dialect.engine, calls, error)) from None
        except EngineError as error:
            if isinstance(error, EngineClosed):
                self._known.pop(asked.name, None)
                raise unavailable(error) from None
            raise self._failed(fresh, unavailable(error)) from None
        self._known[asked.name] = replace(fresh, state=LOADED)
        log.info("adapter loaded", adapter=asked.name)

    def _failed(self, fresh: Known, refusal: Refusal) -> Refusal:
        reason = refusal.reason or AdapterReason.DOWNLOAD_FAILED.value
        self._known[fresh.name] = replace(fresh, state=FAILED, message=str(refusal), reason=reason)
        log.warning("adapter not loaded", adapter=fresh.name, reason=reason, status=refusal.status)
        return refusal

    async def _unload(self, calls: EngineAdapters, name: str) -> None:
        try:
            if name in (await self.listing()).adapters:
                await self._post_unload(calls, name)
        except EngineError as error:
            raise unavailable(error) from None
        finally:
            self._leaving.discard(name)
        self._known.pop(name, None)
        log.info("adapter unloaded", adapter=name)

    async def _post_unload(self, calls: EngineAdapters, name: str) -> None:
        try:
            seconds = self._dialect.probe.timeout_seconds + calls.load_seconds
            await self._engine.post(calls.unload.path, {calls.unload.name_field: name}, seconds=seconds)
        except EngineRefused as error:
            if error.status != 404 or name in (await self.listing()).adapters:
                raise

    def _checked(self, asked: LoadAdapterRequest) -> EngineAdapters:
        if self._calls is None or not self.most:
            what = f"the engine {self._dialect.engine}"
            raise Refusal(400, f"{what} takes no adapters here", reason=AdapterReason.ENGINE_REJECTED)
        if not _NAME.fullmatch(asked.name):
            rule = "letters, digits, '.', '_' and '-', starts with a letter or digit, and has no '..' in it"
            raise Refusal(400, f"an adapter's name is made of {rule}", reason=AdapterReason.ENGINE_REJECTED)
        if asked.digest:
            sentence = f"its digest cannot be checked, because {self._dialect.engine} reads it by itself: name none"
            raise Refusal(400, sentence, reason=AdapterReason.ENGINE_REJECTED)
        if asked.pinned and not self._calls.load.pinned_field:
            sentence = f"{self._dialect.engine} pins no adapters: leave the pin out"
            raise Refusal(400, sentence, reason=AdapterReason.ENGINE_REJECTED)
        return self._calls

    def _source(self, calls: EngineAdapters, asked: LoadAdapterRequest) -> str:
        scheme, _, rest = asked.uri.partition("://")
        if asked.uri.startswith("/"):
            scheme, rest = "file", asked.uri
        if scheme not in calls.sources:
            able = " and ".join(f"{one.value}://" for one in calls.sources)
            sentence = f"{self._dialect.engine} can load only from {able}"
            raise Refusal(400, sentence, reason=AdapterReason.ENGINE_REJECTED)
        if scheme == AdapterSource.FILE:
            if not rest.startswith("/") or "\0" in rest or len(rest) > 4096 or ".." in rest.split("/"):
                raise Refusal(
                    400,
                    "the path of an adapter is absolute and has no '..' in it",
                    reason=AdapterReason.ENGINE_REJECTED,
                )
            return rest
        if not _REPOSITORY.fullmatch(rest):
            sentence = f"{self._dialect.engine} loads an adapter from hf://organisation/name, without a revision"
            raise Refusal(400, sentence, reason=AdapterReason.ENGINE_REJECTED)
        return rest


def _info(known: Known, is_leaving: bool = False) -> AdapterInfo:
    return AdapterInfo(
        name=known.name,
        digest=known.digest if known.state == LOADED else "",
        uri=known.uri,
        state="draining" if is_leaving else known.state,
        pinned=known.pinned,
        message=known.message,
        reason=known.reason,
        version=known.version,
    )


def _address(source: str) -> str:
    """The address of what an engine lists as its source."""
    return f"file://{source}" if source.startswith("/") else f"hf://{source}" if source else ""


def _is_source(uri: str, source: str) -> bool:
    return bool(source) and uri in (source, _address(source))


def _is_taken_over(before: Known | None, asked: LoadAdapterRequest, loaded: str, source: str) -> bool:
    """Whether the engine has loaded the requested adapter. An agent that has restarted has no record of a pin."""
    was_pinned = before is not None and before.pinned
    return loaded == source and was_pinned == asked.pinned


def _load_refusal(engine: str, calls: EngineAdapters, error: EngineRefused) -> Refusal:
    if error.status in (404, 405) and error.detail in ("", "Not Found", "Method Not Allowed"):
        sentence = f"this {engine} was started without {calls.load.path}: it loads no adapters while it serves"
        return Refusal(400, sentence, reason=AdapterReason.ENGINE_REJECTED)
    missing = error.status == 404 or "No adapter found" in error.detail
    reason = AdapterReason.DOWNLOAD_FAILED if missing else AdapterReason.ENGINE_REJECTED
    sentence = refused_by_engine(error, f"{engine} answers {error.status} to the load of the adapter")
    return Refusal(404 if missing else 400, sentence, reason=reason)
