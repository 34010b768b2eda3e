"""State of one replica: loading, warming up, ready, draining, sleeping, stalled or dead; readiness and health.

| engine        | draining | seconds without a step that is due | ready | reason          | health |
|---------------|----------|------------------------------------|-------|-----------------|--------|
| no model      | any      | –                                  | no    | Booting         | yes    |
| no model      | any      | –, and torch is imported           | no    | NoModel         | yes    |
| not loaded    | any      | –                                  | no    | Downloading     | yes    |
| not loaded    | any      | –                                  | no    | Loading         | yes    |
| warming up    | any      | –                                  | no    | WarmingUp       | yes    |
| unclaimed     | any      | –                                  | no    | Standby         | yes    |
| no model      | any      | –, and the last one left memory    | no    | MemoryNotFreed  | yes    |
| loaded        | no       | few                                | yes   | Ready           | yes    |
| loaded        | yes      | few                                | no    | Draining        | yes    |
| asleep        | no       | –                                  | no    | Sleeping        | yes    |
| loaded        | any      | more than a step may take          | no    | StepLoopStalled | yes    |
| loaded        | any      | the process does not run           | no    | StepLoopStalled | yes    |
| loaded        | any      | more than `hang_seconds`           | no    | StepLoopStalled | no     |
| died          | any      | any                                | no    | EngineDead      | no     |

`step_watch.py` says when a step is due, and how long it may take.

A drain makes the replica unready at once, refuses new requests after some seconds (when routers know that it is not
ready), and finishes the open ones. Requests that still run at the deadline end with an error or, where a gateway
records the tokens of the stream, with a mark upon which the gateway continues it on another replica. A replica that
was never ready refuses at once. Where the engine has died, or hangs for `hang_seconds`, none of its requests will
finish: then the drain ends at once (ADR 81).
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from slipway_api.recent_requests import RecentRequests
from slipway_api.runtime_api import DrainStatus, Health, Ready, ReadyReason, Signals, StartupTimes
from slipway_runtime.engine.client import EngineClient, EngineDead
from slipway_runtime.messages import EngineStats, FinishReason, Sleep, WakeUp
from slipway_runtime.server.adapter_registry import AdapterRegistry
from slipway_runtime.server.errors import ApiError, unavailable, unknown_model
from slipway_runtime.server.metrics import Metrics
from slipway_runtime.server.prompt import PromptEncoder
from slipway_runtime.server.step_watch import StepWatch
from slipway_runtime.server.structured import GrammarValidator
from slipway_runtime.server.text_blocks import TextBlockLog
from slipway_runtime.server.tracing import Tracing
from slipway_runtime.settings import SamplingDefaults

log = structlog.get_logger()

HANG_CHECK_SECONDS: Final = 0.25  # how often a draining replica looks whether its engine hangs
ENGINE_STOPPED: Final = "the engine of this replica has stopped"
_ASLEEP: Final = "this replica sleeps until /wake_up is called"
_STARTING: Final = {
    ReadyReason.BOOTING: "no model yet, and the engine process is importing torch and the kernels",
    ReadyReason.NO_MODEL: "no model yet: POST /model brings one",
    ReadyReason.DOWNLOADING: "the model is being downloaded",
    ReadyReason.LOADING: "the model is loading",
    ReadyReason.WARMING_UP: "the first steps are running",
    ReadyReason.MEMORY_NOT_FREED: "memory of the model that was given back is still in use",
    ReadyReason.STANDBY: "the model is here and answers after POST /model",
}
_BROKEN: Final = frozenset({ReadyReason.STEP_LOOP_STALLED, ReadyReason.ENGINE_DEAD})
MOST_WAITING: Final = 8  # callers of the open /ready that wait at the same time
DRAINED_OUT: Final = "the replica is going away and its drain deadline has passed"
HUNG: Final = "the replica is going away and its engine hangs"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The names of a replica's model, the same in headers, bodies and metrics."""

    model: str
    revision: str = ""
    namespace: str = ""
    uri: str = ""

    def answers_to(self, name: str) -> bool:
        """Whether `name` names this model; an empty name does."""
        return name in {"", self.model, f"{self.namespace}/{self.model}"}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The objects that serve requests for a loaded model: engine, prompt encoder, metrics, grammars, adapters."""

    engine: EngineClient
    prompts: PromptEncoder
    metrics: Metrics
    grammars: GrammarValidator
    adapters: AdapterRegistry
    defaults: SamplingDefaults
    max_output_tokens: int = 0
    created: int = 0
    reasoning_parser: str = "auto"  # as the setting

    @property
    def tokenizer_sha256(self) -> str:
        """The digest of the tokenizer and chat template that encode the prompts."""
        return self.prompts.files.sha256


class Replica:
    """State of a process that serves one model. All methods run on the event loop."""

    def __init__(
        self,
        identity: Identity,
        *,
        drain_timeout: float = 120.0,
        hang_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.boot_id = secrets.token_hex(6)
        self.text_blocks = TextBlockLog(self.boot_id)
        self.recent = RecentRequests()
        self.tracing: Tracing | None = None  # set where an endpoint for traces is
        self.clock = clock
        self.loaded: LoadedModel | None = None
        self.startup = StartupTimes()
        self.gateway_token_digests: tuple[str, ...] = ()  # set by POST /model; of an open port
        self.serving_token_digests: tuple[str, ...] = ()  # set by POST /model; the serving port requires one of them
        self._phase = ReadyReason.LOADING if identity.uri else ReadyReason.BOOTING
        self._progress = ""
        self._started_once = asyncio.Event()  # ready for the first time, or drained before
        self._waiting = 0  # callers of `wait_until_started`
        self._draining = False
        self._refusing = False  # whether new requests are refused: from some seconds after the drain began
        self.drain_timeout = drain_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._refuse_at: asyncio.TimerHandle | None = None
        self._hang_seconds = hang_seconds
        self._started = clock()
        self._open: dict[str, bool] = {}  # requests in the engine, and whether another replica can continue each
        self._drained_out: dict[str, str] = {}  # requests that a drain has ended, and why
        self._asleep = 0  # level of sleep; 0: awake
        self._steps: StepWatch | None = None  # of the loaded engine
        self._until_it_hangs: asyncio.Task[None] | None = None  # while it drains

    # --- phases before ready

    def name_model(self, identity: Identity) -> None:
        """Set the identity of the model that this process will serve."""
        self.identity = identity
        self._phase = ReadyReason.LOADING

    def booted(self) -> None:
        """Note that the engine process has imported torch and the kernels, and waits for a model."""
        if self._phase is ReadyReason.BOOTING:
            self._phase = ReadyReason.NO_MODEL

    def memory_not_freed(self, excess: str) -> None:
        """Note that the model which was given back has left memory in use; `excess` says how much."""
        self._phase = ReadyReason.MEMORY_NOT_FREED
        self._progress = f": {excess}"

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
        self._steps = StepWatch(loaded.engine, self.clock, hang_seconds=self._hang_seconds)
        self.startup = startup
        self._phase = ReadyReason.READY
        self._started_once.set()
        if self._refusing:
            loaded.engine.drain()

    # --- probes and signals

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of answers: `model/revision/tokenizer`."""
        tokenizer = self.loaded.tokenizer_sha256[:12] if self.loaded else ""
        return "/".join(part for part in (self.identity.model, self.identity.revision, tokenizer) if part)

    async def wait_until_started(self, seconds: float) -> None:
        """Return when the replica is ready for the first time or begins to drain, or after so long."""
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

    def ready(self) -> Ready:
        """Whether the replica takes new requests, and if not, why."""
        if self.loaded is None:
            return Ready(ready=False, reason=self._phase, message=_STARTING[self._phase] + self._progress)
        if not self.loaded.engine.alive:
            return Ready(ready=False, reason=ReadyReason.ENGINE_DEAD, message=ENGINE_STOPPED)
        assert self._steps is not None
        if (stopped := self._steps.stopped_seconds()) > 0:
            return Ready(
                ready=False,
                reason=ReadyReason.STEP_LOOP_STALLED,
                message=f"the engine's process has not run for {stopped:.0f} s",
            )
        stats, silent, limit = self.stats(), self._steps.silent_seconds(), self._steps.longest_stall
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
        assert self._steps is not None
        if self._steps.hangs:
            limit = f"the limit is {self._hang_seconds:.0f} s"
            message = f"requests wait and no step for {self._steps.silent_seconds():.0f} s, {limit}: the engine hangs"
            return Health(healthy=False, message=message)
        return Health(healthy=True)

    def signals(self) -> Signals:
        """The load signals for the autoscaler."""
        stats = self.stats()
        running, waiting = self._requests()
        return Signals(
            boot_id=self.boot_id,
            kv_usage=stats.blocks_live / stats.blocks_total if stats.blocks_total else 0.0,
            running=running,
            waiting=waiting,
            waiting_tokens=stats.waiting_tokens,
            draining=self._draining,
            admitted=stats.admitted,
            finished=stats.finished,
            aborted=stats.aborted,
            handed_over=stats.handed_over,
            generated_tokens=stats.generated_tokens,
            prompt_tokens=stats.prompt_tokens,
            invalid_logits=stats.invalid_logits,
            starting="" if self.loaded else self._phase.value,
            not_ready=reason.value if (reason := self.ready().reason) in _BROKEN else "",
        )

    def stats(self) -> EngineStats:
        """The engine's statistics; zeros before it is loaded."""
        return self.loaded.engine.stats() if self.loaded is not None else _NOTHING

    def _requests(self) -> tuple[int, int]:
        """Running and waiting requests. Where the engine makes no step any more, its own counts stay as they were."""
        if self._can_finish():
            stats = self.stats()
            return stats.running, stats.waiting
        return len(self._open), 0

    def _can_finish(self) -> bool:
        """Whether the requests of the engine may finish: it has not died and does not hang."""
        if self.loaded is None or self._steps is None:
            return True
        return self.loaded.engine.alive and not self._steps.hangs

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
        """Note that a request has entered the engine, which counts each of its choices."""
        if not self._open and self._steps is not None:
            self._steps.request_came(choices)
        self._open[request_id] = can_continue_elsewhere

    def closed(self, request_id: str) -> None:
        """Note that a request has left the engine, also after an error."""
        self._open.pop(request_id, None)

    def why_it_failed(self, request_id: str, error: str) -> ApiError:
        """The error for the client of a request that the server ended."""
        if self.loaded is not None and not self.loaded.engine.alive:
            return unavailable(ENGINE_STOPPED, started=True)
        if request_id in self._drained_out:
            return unavailable(self._drained_out[request_id], started=True)
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
            self._until_it_hangs = asyncio.create_task(self._end_when_the_engine_hangs())
        if self.loaded is None:
            refuse_after_seconds = 0.0  # it was never ready: no router sends it anything
        seconds = self.drain_timeout if timeout_seconds is None else timeout_seconds
        self._draining = True
        self._started_once.set()
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
        for timer in (self._deadline, self._refuse_at, self._until_it_hangs):
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
        running, waiting = self._requests()
        return DrainStatus(draining=self._draining, running=max(running, len(self._open) - waiting), waiting=waiting)

    @property
    def is_drained(self) -> bool:
        """Whether new requests are refused and no request is left."""
        return self._refusing and self.drain_status().is_drained

    async def drained(self) -> None:
        """Wait until new requests are refused and no request is left."""
        while not self.is_drained:  # noqa: ASYNC110  counters of engine and server
            await asyncio.sleep(0.05)  # the engine's statistics come with its steps, not as an event

    async def all_closed(self) -> None:
        """Wait until no request is open."""
        while self._open:  # noqa: ASYNC110  only at the end of the process
            await asyncio.sleep(0.02)

    async def _end_when_the_engine_hangs(self) -> None:
        """End a drain in which nothing can finish any more: its streams end now, or go on elsewhere."""
        while self._can_finish():  # noqa: ASYNC110  a hang is an event that does not happen
            await asyncio.sleep(HANG_CHECK_SECONDS)
        if self._open:  # else it is the end of a normal stop
            log.warning("the drain ends: the engine makes no step any more", open=len(self._open))
        self._refuse_new_requests()
        self._end_what_is_left(HUNG)

    def _end_what_is_left(self, why: str = DRAINED_OUT) -> None:
        assert self.loaded is not None or not self._open
        for request_id, can_continue_elsewhere in sorted(self._open.items()):
            self._drained_out[request_id] = why
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
