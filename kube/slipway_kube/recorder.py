"""Records Kubernetes Events, which users read with `kubectl describe`: in the background, repetitions as a series.

recorded                                  result
a note for the first time                 a new Event
the same note again within six minutes    its `series.count` grows
another note, same object and reason      a new Event, because the numbers in the note differ
… and the object's rate limit is reached  counted in the last Event's series (a note cannot be changed)

Sending is in the background and best effort: what cannot be sent is counted, never raised.
RBAC: create, patch on events.k8s.io/events.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from slipway_kube.errors import AlreadyExists, KubeError, NotFound
from slipway_kube.resources import EVENTS
from slipway_kube.token_bucket import TokenBucket
from slipway_kube.writer import Writer

LONGEST_NOTE: Final = 1024  # bytes; the server refuses more
SERIES_SECONDS: Final = 360.0  # a series ends after six minutes without a repetition, as in client-go
EVENTS_PER_OBJECT: Final = 25  # new Events for one object at once …
REFILL_SECONDS: Final = 30.0  # … and one more every half minute
QUEUE_LENGTH: Final = 1000
OBJECTS_REMEMBERED: Final = 4096

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Occurrence:
    regarding: dict[str, str]
    related: dict[str, str] | None
    reason: str
    action: str
    note: str
    type: str
    at: datetime
    when: float

    @property
    def series_key(self) -> tuple[str, str, str]:
        return self.regarding["uid"], self.reason, self.action


@dataclass(slots=True)
class _Series:
    """An Event whose repetitions are counted."""

    name: str
    note: str
    count: int
    last: float


class Recorder:
    """Records Events in the background. `record` never blocks and never fails; what cannot be sent is counted."""

    def __init__(
        self,
        writer: Writer,
        *,
        controller: str = "slipway-operator",
        instance: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.dropped = 0
        self._writer = writer
        self._controller = controller
        self._instance = instance[:128]
        self._clock = clock
        self._now = now
        self._queue: asyncio.Queue[_Occurrence] = asyncio.Queue(maxsize=QUEUE_LENGTH)
        self._series: OrderedDict[tuple[str, str, str], _Series] = OrderedDict()
        self._allowances: OrderedDict[str, TokenBucket] = OrderedDict()

    def record(
        self,
        regarding: dict[str, str],
        reason: str,
        note: str,
        *,
        action: str,
        warning: bool = False,
        related: dict[str, str] | None = None,
    ) -> None:
        """Record that `action` was taken on `regarding` for `reason`. `note` is the decision's sentence (cut at 1 KB).

        `regarding` and `related` are object references (see `reference`).
        """
        kind = "Warning" if warning else "Normal"
        occurrence = _Occurrence(regarding, related, reason, action, _cut(note), kind, self._now(), self._clock())
        try:
            self._queue.put_nowait(occurrence)
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        """Send what was recorded, until cancelled."""
        while True:
            occurrence = await self._queue.get()
            try:
                await self._send(occurrence)
            except KubeError as error:
                self.dropped += 1
                log.info("an event was not sent", reason=occurrence.reason, error=str(error))
            except Exception:
                # A malformed event must not keep later ones from being sent.
                self.dropped += 1
                log.exception("an event could not be made", reason=occurrence.reason)
            finally:
                self._queue.task_done()

    async def flush(self) -> None:
        """Return when everything recorded so far was sent or dropped; `run` must be running."""
        await self._queue.join()

    async def _send(self, occurrence: _Occurrence) -> None:
        series = self._series.get(occurrence.series_key)
        if series is not None and occurrence.when - series.last > SERIES_SECONDS:
            series = None
        if series is not None and (series.note == occurrence.note or not self._allows(occurrence)):
            try:
                await self._count(series, occurrence)
                return
            except NotFound:
                pass  # the API server deleted the Event (its ttl is an hour): create a new one
        elif series is None and not self._allows(occurrence):
            self.dropped += 1
            return
        await self._create_event(occurrence)

    async def _create_event(self, occurrence: _Occurrence) -> None:
        name = _name(occurrence)
        namespace = occurrence.regarding.get("namespace") or "default"
        body: dict[str, Any] = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": _stamp(occurrence.at),
            "reportingController": self._controller,
            "reportingInstance": self._instance,
            "regarding": occurrence.regarding,
            "reason": occurrence.reason,
            "action": occurrence.action,
            "note": occurrence.note,
            "type": occurrence.type,
        }
        if occurrence.related is not None:
            body["related"] = occurrence.related
        with contextlib.suppress(AlreadyExists):  # an earlier try succeeded, and its reply was lost
            await self._writer.create(EVENTS, namespace, body)
        self._series[occurrence.series_key] = _Series(name, occurrence.note, 1, occurrence.when)
        self._series.move_to_end(occurrence.series_key)
        while len(self._series) > OBJECTS_REMEMBERED:
            self._series.popitem(last=False)

    async def _count(self, series: _Series, occurrence: _Occurrence) -> None:
        namespace = occurrence.regarding.get("namespace") or "default"
        counted = {"count": series.count + 1, "lastObservedTime": _stamp(occurrence.at)}
        await self._writer.merge_patch(EVENTS, namespace, series.name, {"series": counted})
        series.count += 1
        series.last = occurrence.when

    def _allows(self, occurrence: _Occurrence) -> bool:
        uid = occurrence.regarding["uid"]
        bucket = self._allowances.setdefault(uid, TokenBucket(rate=1 / REFILL_SECONDS, burst=EVENTS_PER_OBJECT))
        self._allowances.move_to_end(uid)
        while len(self._allowances) > OBJECTS_REMEMBERED:
            self._allowances.popitem(last=False)
        return bucket.try_take(occurrence.when)


def reference(api_version: str, kind: str, namespace: str, name: str, uid: str) -> dict[str, str]:
    """An ObjectReference for `record`."""
    return {"apiVersion": api_version, "kind": kind, "namespace": namespace, "name": name, "uid": uid}


def _name(occurrence: _Occurrence) -> str:
    """The Event's name, the same for every try: a retry after a lost reply gets AlreadyExists."""
    parts = (*occurrence.series_key, occurrence.note, occurrence.at.isoformat())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{occurrence.regarding['name'][:200]}.{digest}"


def _cut(note: str) -> str:
    raw = note.encode()
    if len(raw) <= LONGEST_NOTE:
        return note
    return raw[: LONGEST_NOTE - len("…".encode())].decode(errors="ignore") + "…"


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
