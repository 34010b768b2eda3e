"""State of the replica (the engine and this agent): starting, ready, draining, sleeping, silent or dead.

| probe of the engine        | it was well before | ready | reason          |
|----------------------------|--------------------|-------|-----------------|
| its port is closed         | any                | no    | Loading         |
| an error status            | no                 | no    | Loading         |
| an error status            | yes                | no    | EngineDead      |
| no answer for a while      | yes                | yes   | Ready           |
| none for `unreadyAfter`    | yes                | no    | StepLoopStalled |
| 200, a drain has begun     | any                | no    | Draining        |
| 200, it sleeps             | any                | no    | Sleeping        |
| 200, the boot list loads   | any                | no    | WarmingUp       |
| 200                        | any                | yes   | Ready           |

A drain is over when no request was counted for the dialect's `quietSeconds`. A count that cannot be read is an
error, never a zero: then the drain continues until its owner's deadline. The agent cannot make the engine refuse
requests, and ends none.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from slipway_agent import readings
from slipway_agent.engine import Engine, EngineClosed, EngineError, EngineRefused, EngineSilent, EngineUnreadable
from slipway_agent.page import UnreadablePage
from slipway_agent.readings import Readings
from slipway_agent.refusal import Refusal, refused_by_engine, unavailable
from slipway_api.dialect import Dialect, EngineSleep
from slipway_api.runtime_api import DrainStatus, Ready, ReadyReason, Signals

log = structlog.get_logger()

PROBE_SECONDS: Final = 1.0  # between two probes of the engine
STARTING_PROBE_SECONDS: Final = 0.25
FRESH_SECONDS: Final = 0.2  # readings this old are not read again: a page costs the engine some milliseconds
MOST_WAITING: Final = 64  # callers that wait for a state of the replica at the same time


@dataclass(frozen=True, slots=True)
class Count:
    """Requests that the engine has."""

    running: int
    waiting: int


class Replica:
    """One engine, as seen from beside it. All methods run on the event loop."""

    def __init__(self, dialect: Dialect, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.dialect = dialect
        self.engine = engine
        self.clock = clock
        self.on_boot: Callable[[], Awaitable[None]] | None = None  # awaited after each start of the engine
        self.outdated_certificate_ends: Callable[[], int] = lambda: 0  # see `engine_certificate`
        self.on_probe: Callable[[], None] | None = None  # called after each probe of the engine
        self._nonce = secrets.token_hex(4)
        self._boots = 0
        self._start = ""  # as the page says it
        self._began = clock()
        self._is_started = False
        self._was_started = False  # at any time since this process began
        self._why_not = "the engine has not been queried yet"
        self._is_dead = False
        self._silent_since: float | None = None
        self._asleep: int | None = None  # level; 0: awake; None: not known
        self._booting: asyncio.Task[None] | None = None
        self._drain_since: float | None = None
        self._refuse_after = 0.0
        self._zero_since: float | None = None  # while draining: since when no request has been counted
        self._before: Readings | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()
        self._started_once = asyncio.Event()
        self._waiting = 0

    # --- the engine

    async def watch(self) -> None:
        """Probe the engine until cancelled."""
        while True:
            await self.probe()
            if self.on_probe is not None:
                self.on_probe()
            if self.draining:
                await self._look()
            await asyncio.sleep(PROBE_SECONDS if self._is_started else STARTING_PROBE_SECONDS)

    async def probe(self) -> None:
        """Ask the engine once whether it is well."""
        asked, probe = self.clock(), self.dialect.probe
        try:
            status = await self.engine.status(probe.path, seconds=probe.timeout_seconds)
        except EngineClosed:
            self._has_ended("its port is closed: it is starting, or has ended")
        except EngineSilent as error:
            self._silent_since = asked if self._silent_since is None else self._silent_since
            self._why_not = str(error)
        except EngineError as error:
            self._why_not = str(error)
        else:
            self._silent_since = None
            self._is_dead = self._is_started and status != 200
            self._why_not = f"GET {probe.path}: the engine answers {status}"
            if status == 200:
                await self._is_well()

    async def _is_well(self) -> None:
        if not self._is_started:
            log.info("the engine is well", seconds=round(self.uptime_seconds, 1))
            self._is_started = self._was_started = True
            self._boots += 1
            try:
                await self._read()  # learns which start this is
            except EngineError as error:
                log.warning("the metrics cannot be read", error=str(error))
            self._has_booted()
        if self._asleep is None:
            await self._ask_whether_it_sleeps()
        self._started_once.set()

    def _has_ended(self, why: str) -> None:
        if self._is_started:
            log.warning("the engine has ended", why=why)
        self._is_started = self._is_dead = False
        self._asleep = self._before = self._zero_since = self._silent_since = None
        self._why_not = why

    def _has_booted(self) -> None:
        """The engine has restarted: earlier requests to it no longer apply."""
        self._asleep = None
        if self._booting is not None:
            self._booting.cancel()
        self._booting = asyncio.ensure_future(self._boot()) if self.on_boot is not None else None

    async def _boot(self) -> None:
        assert self.on_boot is not None
        try:
            await self.on_boot()
        except Exception as error:  # noqa: BLE001  a replica without an adapter is worth more than none
            log.warning("the boot list", error=type(error).__name__)

    async def stop(self) -> None:
        """Cancel the background tasks."""
        if self._booting is not None:
            self._booting.cancel()
            await asyncio.wait([self._booting])

    @property
    def is_started(self) -> bool:
        """Whether the engine has been well since its last start."""
        return self._is_started

    @property
    def can_finish_requests(self) -> bool:
        """False while a stop hook has nothing to wait for: the engine is down, dead, or due for its restart."""
        if not self._is_started or self._is_dead:
            return False
        return (
            self._silent_since is None or self.clock() - self._silent_since < self.dialect.probe.restart_after_seconds
        )

    @property
    def boot_id(self) -> str:
        """Changes with every start of the engine."""
        return self._start or f"{self._nonce}{self._boots:04x}"

    @property
    def uptime_seconds(self) -> float:
        """Since this process began."""
        return self.clock() - self._began

    async def readings(self) -> Readings:
        """The present values of the engine's metrics; raises EngineError."""
        async with self._reading:
            if self._before is not None and self.clock() - self._read_at < FRESH_SECONDS:
                return self._before
            return await self._read()

    async def _read(self) -> Readings:
        metrics = self.dialect.metrics
        wanted = readings.wanted_names(metrics)
        page = await self.engine.page(metrics.path, wanted, seconds=self.dialect.probe.timeout_seconds)
        try:
            found = readings.read(page, metrics)
        except UnreadablePage as error:
            raise EngineUnreadable(str(error)) from None
        before, self._before, self._read_at = self._before, found, self.clock()
        has_fallen = before is not None and any(
            now < then for now, then in zip(found.counters, before.counters, strict=True)
        )
        if found.start != self._start or (has_fallen and not found.start):
            is_first = not self._start and before is None
            self._start = found.start
            if not is_first:
                self._boots += 1
                self._has_booted()
        return found

    # --- probes and signals

    @property
    def draining(self) -> bool:
        """Whether a drain has begun."""
        return self._drain_since is not None

    def ready(self) -> Ready:
        """Whether the replica takes new requests, and if not, why."""
        if not self._is_started:
            return Ready(ready=False, reason=ReadyReason.LOADING, message=self._why_not)
        if self._is_dead:
            return Ready(ready=False, reason=ReadyReason.ENGINE_DEAD, message=self._why_not)
        silent = self.clock() - self._silent_since if self._silent_since is not None else 0.0
        if silent > (limit := self.dialect.probe.unready_after_seconds):
            message = f"the engine has not answered for {silent:.0f} s, the limit is {limit} s: {self._why_not}"
            return Ready(ready=False, reason=ReadyReason.STEP_LOOP_STALLED, message=message)
        if self.draining:
            return Ready(ready=False, reason=ReadyReason.DRAINING, message="the replica drains")
        if self._asleep is None:
            message = "the engine has not said whether it sleeps"
            return Ready(ready=False, reason=ReadyReason.LOADING, message=message)
        if self._asleep:
            message = "this replica sleeps until /wake_up is called"
            return Ready(ready=False, reason=ReadyReason.SLEEPING, message=message)
        if self._booting is not None and not self._booting.done():
            message = "the adapters of the boot list are loading"
            return Ready(ready=False, reason=ReadyReason.WARMING_UP, message=message)
        return Ready(ready=True, reason=ReadyReason.READY)

    async def wait_until_started(self, seconds: float) -> None:
        """Return when the engine is well for the first time or a drain begins, or after so long."""
        if seconds <= 0 or self._started_once.is_set() or self._waiting >= MOST_WAITING:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._started_once.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    async def signals(self) -> Signals:
        """The load signals; raises Refusal 503 where the engine's metrics cannot be read."""
        if not self._is_started and not self._was_started:
            return Signals(
                boot_id=self.boot_id,
                kv_usage=0.0,
                running=0,
                waiting=0,
                draining=self.draining,
                starting=ReadyReason.LOADING.value,
            )
        ready = self.ready()
        if not self._is_started:
            if self.draining:  # its requests may still run: a closing server closes its port first
                raise Refusal(503, f"the requests cannot be counted: {self._why_not}")
            loading = ReadyReason.LOADING.value
            return Signals(boot_id=self.boot_id, kv_usage=0.0, running=0, waiting=0, starting=loading)
        try:
            now = await self.readings()
            count = await self._counted() if self.draining else Count(now.running, now.waiting)
        except EngineError as error:
            raise unavailable(error) from None
        is_broken = ready.reason in (ReadyReason.ENGINE_DEAD, ReadyReason.STEP_LOOP_STALLED)
        return Signals(
            boot_id=self.boot_id,
            kv_usage=now.kv_usage,
            running=count.running,
            waiting=count.waiting,
            draining=self.draining,
            admitted=now.finished + now.aborted + count.running + count.waiting,
            finished=now.finished,
            aborted=now.aborted,
            generated_tokens=now.generation_tokens,
            prompt_tokens=now.prompt_tokens,
            outdated_certificate_ends=self.outdated_certificate_ends(),
            not_ready=ready.reason.value if is_broken else "",
        )

    # --- drain

    async def count(self) -> Count:
        """Requests that the engine has, those included that its metrics do not show yet; raises EngineError."""
        now = await self.readings()
        running = now.running
        if (extra := self.dialect.drain.in_flight) is not None:
            answer = await self.engine.get(extra.path, seconds=self.dialect.probe.timeout_seconds)
            held = _number(answer, extra.field, extra.path)
            running = max(running, held - now.waiting)
        return Count(running, now.waiting)

    async def drain(self, *, refuse_after_seconds: float = 0.0, reason: str = "") -> DrainStatus:
        """Become unready immediately; the progress. Idempotent. Raises Refusal 503 where nothing can be counted.

        Routers send requests for `refuse_after_seconds` more: before that, no drain is over.
        """
        now = self.clock()
        if self._drain_since is None:
            log.info("draining", reason=reason[:200])
            self._drain_since, self._refuse_after = now, refuse_after_seconds
            self._started_once.set()
        self._refuse_after = min(self._refuse_after, now - self._drain_since + refuse_after_seconds)
        return await self.drain_status()

    async def undrain(self) -> DrainStatus:
        """End the drain. It needs no count: the numbers are zeros where there is none."""
        self._drain_since = self._zero_since = None
        try:
            count = await self.count() if self._is_started else Count(0, 0)
        except EngineError:
            count = Count(0, 0)
        return DrainStatus(draining=False, running=count.running, waiting=count.waiting)

    async def drain_status(self) -> DrainStatus:
        """Progress of a drain; raises Refusal 503 where the requests cannot be counted."""
        if not self._is_started:
            if self._was_started:
                raise Refusal(503, f"the requests cannot be counted: {self._why_not}")
            return DrainStatus(draining=self.draining, running=0, waiting=0)
        try:
            count = await self._counted()
        except EngineError as error:
            raise unavailable(error) from None
        return DrainStatus(draining=self.draining, running=count.running, waiting=count.waiting)

    async def drained(self) -> None:
        """Return when a drain is over; never while none has begun."""
        while not await self._is_over():  # noqa: ASYNC110  the end is counted, not told
            await asyncio.sleep(STARTING_PROBE_SECONDS)

    async def _is_over(self) -> bool:
        try:
            return self.draining and (await self.drain_status()).is_drained
        except Refusal:
            return False

    async def _look(self) -> None:
        """Count while a drain runs, whether or not anybody asks."""
        try:
            await self._counted()
        except EngineError as error:
            log.warning("the requests cannot be counted", error=str(error))

    async def _counted(self) -> Count:
        """The count; while a drain is not certainly over, at least one request."""
        try:
            count = await self.count()
        except EngineError:
            self._zero_since = None
            raise
        if self._drain_since is None:
            return count
        now = self.clock()
        if count.running + count.waiting:
            self._zero_since = None
            return count
        self._zero_since = now if self._zero_since is None else self._zero_since
        is_quiet = now - self._zero_since >= self.dialect.drain.quiet_seconds
        may_end = now - self._drain_since >= self._refuse_after
        return count if is_quiet and may_end else Count(1, 0)

    # --- sleep

    @property
    def asleep(self) -> int:
        """Level of sleep; 0: awake, or not known."""
        return self._asleep or 0

    async def sleep(self, level: int) -> None:
        """Free the device's memory; raises Refusal. Idempotent."""
        calls = self._sleep_calls()
        if level not in calls.levels:
            able = ", ".join(map(str, calls.levels))
            raise Refusal(400, f"the engine {self.dialect.engine} wakes up with its weights only from level {able}")
        self._must_have_started()
        if self._asleep == level:
            return
        try:
            count = await self.count()
        except EngineError as error:
            raise unavailable(error) from None
        if held := count.running + count.waiting:
            raise Refusal(409, f"the engine has requests ({held}): drain first, or wait")
        self._asleep = level  # first, so that no router sends a request while it falls asleep
        query = f"{calls.level_parameter}={level}"
        await self._call_for_sleep(calls.sleep_path, query, calls)

    async def wake_up(self) -> None:
        """End the sleep; raises Refusal. Idempotent."""
        calls = self._sleep_calls()
        self._must_have_started()
        if self._asleep == 0:
            return
        await self._call_for_sleep(calls.wake_path, "", calls)

    def _sleep_calls(self) -> EngineSleep:
        if self.dialect.sleep is None:
            raise Refusal(501, f"the engine {self.dialect.engine} has no calls to sleep and wake up")
        return self.dialect.sleep

    def _must_have_started(self) -> None:
        if not self._is_started:
            raise Refusal(503, self._why_not)

    async def _call_for_sleep(self, path: str, query: str, calls: EngineSleep) -> None:
        try:
            await self.engine.post(path, query=query, seconds=calls.seconds)
        except EngineRefused as error:
            await self._ask_whether_it_sleeps()
            if error.status == 404:
                engine = self.dialect.engine
                raise Refusal(501, f"this {engine} was started without sleep: it has no {path}") from None
            raise Refusal(409, refused_by_engine(error, str(error))) from None
        except EngineError as error:
            self._asleep = None  # it may sleep: not ready until it reports that it does not
            raise unavailable(error) from None
        await self._ask_whether_it_sleeps()
        if path == calls.sleep_path and self._asleep == 0:
            raise Refusal(409, "the engine answered that it sleeps, and says that it does not")

    async def _ask_whether_it_sleeps(self) -> None:
        """Learn whether the engine sleeps. An engine that has no such call cannot be put to sleep: it is awake."""
        calls = self.dialect.sleep
        if calls is None:
            self._asleep = 0
            return
        try:
            answer = await self.engine.get(calls.state_path, seconds=self.dialect.probe.timeout_seconds)
            sleeps = answer[calls.state_field]
            if not isinstance(sleeps, bool):
                raise EngineUnreadable(f"GET {calls.state_path}: {calls.state_field} is not a boolean")
        except EngineRefused as error:
            self._asleep = 0 if error.status == 404 else None
        except (EngineError, KeyError, TypeError, IndexError):
            self._asleep = None
        else:
            self._asleep = (self._asleep or calls.levels[0]) if sleeps else 0


def _number(answer: Any, field: str, path: str) -> int:
    value = answer.get(field) if isinstance(answer, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise EngineUnreadable(f"GET {path}: {field} is not a number of requests")
    return value
