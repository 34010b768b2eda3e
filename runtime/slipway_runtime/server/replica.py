"""State of one replica: loading, warming up, ready, draining, sleeping, stalled or dead; readiness and health.

| engine        | draining | seconds without a step that is due | ready | reason          | health |
|---------------|----------|------------------------------------|-------|-----------------|--------|
| no model      | any      | –                                  | no    | Booting         | yes    |
| no model      | any      | –, and torch is imported           | no    | NoModel         | yes    |
| not loaded    | any      | –                                  | no    | Downloading     | yes    |
| not loaded    | any      | –                                  | no    | Loading         | yes    |
| warming up    | any      | –                                  | no    | WarmingUp       | yes    |
| unclaimed     | any      | –                                  | no    | Standby         | yes    |
| loaded        | no       | few                                | yes   | Ready           | yes    |
| loaded        | yes      | few                                | no    | Draining        | yes    |
| asleep        | no       | –                                  | no    | Sleeping        | yes    |
| loaded        | any      | more than a step may take          | no    | StepLoopStalled | yes    |
| loaded        | any      | more than `hang_seconds`           | no    | StepLoopStalled | no     |
| died          | any      | any                                | no    | EngineDead      | no     |

A step is due while the engine has requests. An idle engine gets a ping every few seconds, whose answer is due, so that
a hanging engine is found before the first request. The allowed time of a step grows with the longest step so far: a
prompt of 30,000 tokens on a CPU is slow, and does not hang.

A drain makes the replica unready at once, refuses new requests after some seconds (when routers know that it is not
ready), and finishes the open ones. Requests that still run at the deadline end with an error or, where a gateway
records the tokens of the stream, with a mark upon which the gateway continues it on another replica.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Final

import structlog

from slipway_api.runtime_api import DrainStatus, Health, Ready, ReadyReason, Signals, StartupTimes
from slipway_runtime.engine.client import EngineDead
from slipway_runtime.messages import EngineStats, FinishReason, Ping, Sleep, WakeUp
from slipway_runtime.server.errors import ApiError, unavailable, unknown_model
from slipway_runtime.server.loaded import Identity, LoadedModel
from slipway_runtime.server.text_blocks import TextBlockLog

log = structlog.get_logger()

PING_AFTER_SECONDS: Final = 2.0  # without a step, and without work
LONGEST_STEPS: Final = 4.0  # limit of a step, in multiples of the longest so far: attention grows with the context
ENGINE_STOPPED: Final = "the engine of this replica has stopped"
_ASLEEP: Final = "this replica sleeps until /wake_up is asked for"
_STARTING: Final = {
    ReadyReason.BOOTING: "no model yet, and the engine process is importing torch and the kernels",
    ReadyReason.NO_MODEL: "no model yet: POST /model brings one",
    ReadyReason.DOWNLOADING: "the model is being downloaded",
    ReadyReason.LOADING: "the model is loading",
    ReadyReason.WARMING_UP: "the first steps are running",
    ReadyReason.STANDBY: "the model is here and answers after POST /model",
}
_BROKEN: Final = frozenset({ReadyReason.STEP_LOOP_STALLED, ReadyReason.ENGINE_DEAD})
DRAINED_OUT: Final = "the replica is going away and its drain deadline has passed"


class Replica:
    """State of a process that serves one model. All methods run on the event loop."""

    def __init__(
        self,
        identity: Identity,
        *,
        drain_timeout: float = 120.0,
        stall_seconds: float = 6.0,
        hang_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.boot_id = secrets.token_hex(6)
        self.text_blocks = TextBlockLog(self.boot_id)
        self.clock = clock
        self.loaded: LoadedModel | None = None
        self.startup = StartupTimes()
        self.serving_token_digests: tuple[str, ...] = ()  # set by POST /model; the serving port requires one of them
        self._phase = ReadyReason.LOADING if identity.uri else ReadyReason.BOOTING
        self._progress = ""
        self._draining = False
        self._refusing = False  # whether new requests are refused: from some seconds after the drain began
        self.drain_timeout = drain_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._refuse_at: asyncio.TimerHandle | None = None
        self._stall_seconds = stall_seconds
        self._hang_seconds = hang_seconds
        self._started = clock()
        self._open: dict[str, bool] = {}  # requests in the engine, and whether another replica can continue each
        self._busy_since = 0.0
        self._drained_out: set[str] = set()
        self._asleep = 0  # level of sleep; 0: awake
        self._ping: asyncio.Task[None] | None = None
        self._pinged_at = 0.0

    # --- phases before ready

    def name_model(self, identity: Identity) -> None:
        """Set the identity of the model that this process will serve."""
        self.identity = identity
        self._phase = ReadyReason.LOADING

    def booted(self) -> None:
        """Note that the engine process has imported torch and the kernels, and waits for a model."""
        if self._phase is ReadyReason.BOOTING:
            self._phase = ReadyReason.NO_MODEL

    def downloading(self) -> None:
        """Note that the model is being downloaded."""
        self._phase = ReadyReason.DOWNLOADING

    def loading(self, bytes_done: int = 0, bytes_total: int = 0) -> None:
        """Note that the weights are being loaded, and how many bytes are in memory."""
        self._phase = ReadyReason.LOADING
        self._progress = f": {bytes_done / 2**30:.1f} of {bytes_total / 2**30:.1f} GiB" if bytes_total else ""

    def warming_up(self) -> None:
        """Note that the weights are loaded, and the warm-up steps are being computed."""
        self._phase = ReadyReason.WARMING_UP
        self._progress = ""

    def standing_by(self) -> None:
        """Note that the model is loaded and waits for its claim."""
        self._phase = ReadyReason.STANDBY

    def ready_with(self, loaded: LoadedModel, startup: StartupTimes) -> None:
        """Begin to serve requests, unless a drain came first."""
        self.loaded = loaded
        self.startup = startup
        self._phase = ReadyReason.READY
        if self._refusing:
            loaded.engine.drain()

    # --- probes and signals

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of answers: `model/revision/tokenizer`."""
        tokenizer = self.loaded.tokenizer_sha256[:12] if self.loaded else ""
        return "/".join(part for part in (self.identity.model, self.identity.revision, tokenizer) if part)

    def ready(self) -> Ready:
        """Whether the replica takes new requests, and if not, why."""
        if self.loaded is None:
            return Ready(ready=False, reason=self._phase, message=_STARTING[self._phase] + self._progress)
        if not self.loaded.engine.alive:
            return Ready(ready=False, reason=ReadyReason.ENGINE_DEAD, message=ENGINE_STOPPED)
        stats = self.loaded.engine.stats()
        silent, limit = self._silent_seconds(stats), self._longest_stall()
        if silent > limit:
            return Ready(
                ready=False,
                reason=ReadyReason.STEP_LOOP_STALLED,
                message=f"{stats.running + stats.waiting} requests and no step for {silent:.0f} s, "
                f"the limit is {limit:.0f} s",
            )
        if self._draining:
            left = stats.running + stats.waiting
            return Ready(ready=False, reason=ReadyReason.DRAINING, message=f"{left} requests are left")
        if self._asleep:
            return Ready(ready=False, reason=ReadyReason.SLEEPING, message=_ASLEEP)
        return Ready(ready=True, reason=ReadyReason.READY)

    def health(self) -> Health:
        """Whether the process can recover by itself; if not, the kubelet restarts the container."""
        if self.loaded is None:
            return Health(healthy=True)
        if not self.loaded.engine.alive:
            return Health(healthy=False, message=ENGINE_STOPPED)
        silent = self._silent_seconds(self.loaded.engine.stats())
        if silent > self._hang_seconds:
            limit = f"the limit is {self._hang_seconds:.0f} s"
            message = f"requests wait and no step for {silent:.0f} s, {limit}: the engine hangs"
            return Health(healthy=False, message=message)
        return Health(healthy=True)

    def _silent_seconds(self, stats: EngineStats) -> float:
        """Seconds without a step although one was due; 0 where none is due."""
        assert self.loaded is not None
        times, now = self.loaded.engine.times, self.clock()
        if self._ping is not None and not self._ping.done():
            return max(0.0, now - max(times.reported_at, self._pinged_at))
        if stats.running + stats.waiting > stats.paused:
            return max(0.0, now - max(stats.last_step_at, times.waiting_since, self._busy_since))
        if now - times.reported_at > PING_AFTER_SECONDS:
            self._pinged_at, self._ping = now, asyncio.create_task(self._send_ping())
        return 0.0

    def _longest_stall(self) -> float:
        """Seconds that a step may take before the replica counts as stalled; at most `hang_seconds`."""
        assert self.loaded is not None
        return min(self._stall_seconds + LONGEST_STEPS * self.loaded.engine.times.longest, self._hang_seconds)

    async def _send_ping(self) -> None:
        """Ping the engine. Readiness probes of the kubelet and the operator, each second, trigger the pings."""
        assert self.loaded is not None
        with contextlib.suppress(EngineDead):
            await self.loaded.engine.call(Ping(call=0))

    def signals(self) -> Signals:
        """The load signals for the autoscaler."""
        stats = self.stats()
        return Signals(
            boot_id=self.boot_id,
            kv_usage=stats.blocks_live / stats.blocks_total if stats.blocks_total else 0.0,
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            draining=self._draining,
            admitted=stats.admitted,
            finished=stats.finished,
            aborted=stats.aborted,
            handed_over=stats.handed_over,
            generated_tokens=stats.generated_tokens,
            prompt_tokens=stats.prompt_tokens,
            starting="" if self.loaded else self._phase.value,
            not_ready=reason.value if (reason := self.ready().reason) in _BROKEN else "",
        )

    def stats(self) -> EngineStats:
        """The engine's statistics; zeros before it is loaded."""
        return self.loaded.engine.stats() if self.loaded is not None else _NOTHING

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the start of this process."""
        return self.clock() - self._started

    # --- requests

    def model_for(self, name: str) -> LoadedModel:
        """The loaded model for a request for `name`; raises ApiError where it cannot be served."""
        if self.identity.uri and not self.identity.answers_to(name):
            raise unknown_model(name)
        if self.loaded is None:
            raise unavailable(self.ready().message)
        if not self.loaded.engine.alive:
            raise unavailable(ENGINE_STOPPED)
        if self._refusing:
            raise unavailable("this replica is draining")
        if self._asleep:
            raise unavailable(_ASLEEP)
        return self.loaded

    def opened(self, request_id: str, *, choices: int = 1, can_continue_elsewhere: bool = False) -> None:
        """Note that a request has entered the engine, which counts each of its choices.

        Starts the time for stall detection if the engine was idle. An engine that hangs makes no step and still counts
        requests that have left: then a new request must not restart the time.
        """
        stats = self.stats()
        was_idle = stats.running + stats.waiting <= choices or stats.last_step_at >= self._busy_since
        if not self._open and was_idle:
            self._busy_since = self.clock()
        self._open[request_id] = can_continue_elsewhere

    def closed(self, request_id: str) -> None:
        """Note that a request has left the engine, also after an error."""
        self._open.pop(request_id, None)

    def why_it_failed(self, request_id: str, error: str) -> ApiError:
        """The error for the client of a request that the server ended."""
        if request_id in self._drained_out:
            return unavailable(DRAINED_OUT, started=True)
        if self.loaded is not None and not self.loaded.engine.alive:
            return unavailable(ENGINE_STOPPED, started=True)
        return ApiError(500, error or "the request was ended by the engine")

    # --- sleep

    @property
    def asleep(self) -> int:
        """The level of sleep; 0: awake."""
        return self._asleep

    async def sleep(self, level: int) -> None:
        """Free the device's memory; raises ApiError while requests are open. Idempotent."""
        if self.loaded is None:
            raise unavailable(self.ready().message)
        if self._asleep == level:
            return
        if self._open:
            raise ApiError(409, f"{len(self._open)} requests are open: drain first, or wait")
        before, self._asleep = self._asleep, level  # first, so that no new request enters meanwhile
        try:
            await self._call(Sleep(call=0, level=level))
        except ApiError:
            self._asleep = before
            raise
        finally:
            self.loaded.metrics.engine.asleep = self._asleep

    async def wake_up(self) -> None:
        """End the sleep. Idempotent."""
        if self._asleep:
            await self._call(WakeUp(call=0))
            assert self.loaded is not None
            self._asleep = self.loaded.metrics.engine.asleep = 0

    async def _call(self, message: Sleep | WakeUp) -> None:
        assert self.loaded is not None
        try:
            reply = await self.loaded.engine.call(message)
        except EngineDead:
            raise unavailable(ENGINE_STOPPED) from None
        if reply.error:
            raise ApiError(409, reply.error)

    # --- drain

    @property
    def draining(self) -> bool:
        """Whether a drain has begun: the replica is not ready, and refuses new requests soon."""
        return self._draining

    def drain(
        self, timeout_seconds: float | None = None, reason: str = "", *, refuse_after_seconds: float = 0.0
    ) -> DrainStatus:
        """Become unready at once, refuse new requests after `refuse_after_seconds`, finish open ones by the deadline.

        Idempotent: of two deadlines, and of two times to refuse from, the earlier one holds.
        """
        if not self._draining:
            log.info("draining", reason=reason, open=len(self._open))
        seconds = self.drain_timeout if timeout_seconds is None else timeout_seconds
        self._draining = True
        self._deadline = _earlier(self._deadline, seconds, self._end_what_is_left)
        if min(seconds, refuse_after_seconds) <= 0:
            self._refuse_new_requests()
        elif not self._refusing:
            self._refuse_at = _earlier(self._refuse_at, min(seconds, refuse_after_seconds), self._refuse_new_requests)
        return self.drain_status()

    def _refuse_new_requests(self) -> None:
        self._refusing = True
        if self.loaded is not None:
            self.loaded.engine.drain()

    def undrain(self) -> DrainStatus:
        """End the drain: take requests again."""
        for timer in (self._deadline, self._refuse_at):
            if timer is not None:
                timer.cancel()
        self._deadline = self._refuse_at = None
        self._draining = self._refusing = False
        self._drained_out.clear()
        if self.loaded is not None:
            self.loaded.engine.undrain()
        return self.drain_status()

    def drain_status(self) -> DrainStatus:
        """Progress of a drain; a request counts until its last byte is written to the socket."""
        stats = self.stats()
        running = max(stats.running, len(self._open) - stats.waiting)
        return DrainStatus(draining=self._draining, running=running, waiting=stats.waiting)

    async def drained(self) -> None:
        """Wait until new requests are refused and no request is left."""
        while not (self._refusing and self.drain_status().is_drained):  # noqa: ASYNC110  counters of engine and server
            await asyncio.sleep(0.05)  # the engine's statistics come with its steps, not as an event

    async def all_closed(self) -> None:
        """Wait until no request is open."""
        while self._open:  # noqa: ASYNC110  only at the end of the process
            await asyncio.sleep(0.02)

    def _end_what_is_left(self) -> None:
        assert self.loaded is not None or not self._open
        for request_id, can_continue_elsewhere in sorted(self._open.items()):
            self._drained_out.add(request_id)
            assert self.loaded is not None
            reason = FinishReason.HANDED_OVER if can_continue_elsewhere else FinishReason.ERROR
            self.loaded.engine.abort(request_id, reason)


def _earlier(timer: asyncio.TimerHandle | None, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    """The earlier of `timer` and a new timer that fires in `seconds`."""
    loop = asyncio.get_running_loop()
    when = loop.time() + seconds
    if timer is not None:
        if timer.when() <= when:
            return timer
        timer.cancel()
    return loop.call_at(when, call)


_NOTHING: Final = EngineStats(
    running=0,
    waiting=0,
    waiting_tokens=0,
    blocks_total=0,
    blocks_live=0,
    blocks_cached=0,
    steps=0,
    preemptions=0,
    prefix_queries=0,
    prefix_hits=0,
    admitted=0,
    finished=0,
    aborted=0,
    handed_over=0,
    last_step_at=0.0,
)
