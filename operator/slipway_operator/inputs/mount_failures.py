"""Reads why the kubelet cannot mount the volumes of a pod: only its events name the Secret, ConfigMap or claim.

Events are listed, never watched, and only while a replica with a node has had no running container for a few seconds:
one namespace at a time, so a fleet that starts costs the API server two small lists every few seconds.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog

from slipway_api.types import ServiceKey
from slipway_kube.client import Client
from slipway_kube.errors import Forbidden, KubeError
from slipway_kube.informer import Change
from slipway_kube.objects import Pod, Slim
from slipway_kube.resources import EVENTS
from slipway_operator.inputs.observer import has_begun

log = structlog.get_logger()

REASONS: Final = ("FailedMount", "FailedAttachVolume")
PATIENCE_SECONDS: Final = 4.0  # most pods have mounted their volumes by then
ROUND_SECONDS: Final = 3.0
OLD_PODS_EVERY_SECONDS: Final = 15.0  # a namespace whose pods have been creating for longer, for an image
REFUSED_EVERY_SECONDS: Final = 300.0  # a namespace whose events may not be read
CURRENT: Final = timedelta(minutes=5)  # the kubelet tries again after 122 s at the latest
MOST_EVENTS: Final = 500
MESSAGE_SHOWN: Final = 400
_SUMMARY: Final = "Unable to attach or mount volumes"  # names the volume, and not the cause


class Regarding(Slim, frozen=True):
    """The object of an event."""

    uid: str = ""


class Series(Slim, frozen=True):
    """How often an event was repeated, and when last."""

    last_observed_time: datetime | None = None


class Event(Slim, frozen=True):
    """The fields of an event that name a cause."""

    note: str = ""
    regarding: Regarding = Regarding()
    event_time: datetime | None = None
    deprecated_last_timestamp: datetime | None = None
    series: Series | None = None

    @property
    def at(self) -> datetime | None:
        """When it was last observed."""
        last = self.series.last_observed_time if self.series is not None else None
        return max((one for one in (last, self.deprecated_last_timestamp, self.event_time) if one), default=None)


class EventList(Slim, frozen=True):
    """A list of events."""

    items: tuple[Event, ...] = ()


class MountFailures:
    """The sentences of the kubelet about volumes that it cannot mount, by uid of the pod."""

    def __init__(
        self,
        client: Client,
        *,
        on_news: Callable[[Pod], None],
        now: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_news` is called with a pod whose sentence has changed."""
        self._client = client
        self._on_news = on_news
        self._now = now
        self._monotonic = monotonic
        self._creating: dict[str, tuple[Pod, float]] = {}  # by uid: since when it was seen
        self._found: dict[str, str] = {}
        self._next: dict[str, float] = {}  # by namespace: when its events are listed again

    def of(self, uid: str) -> str:
        """Why the volumes of this pod cannot be mounted; empty: nothing is known."""
        return self._found.get(uid, "")

    def saw(self, change: Change, old: Pod | None, new: Pod | None, _services: set[ServiceKey]) -> None:
        """Apply one change of a pod."""
        pod = new or old
        if pod is None:
            return
        if change is Change.DELETED or new is None or not is_mounting(new):
            self._creating.pop(pod.uid, None)
            self._found.pop(pod.uid, None)
        else:
            since = self._creating.get(pod.uid, (new, self._monotonic()))[1]
            self._creating[pod.uid] = new, since

    async def run(self) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            await self.look()

    async def look(self) -> None:
        """List the events of each namespace with a pod that waits for its volumes."""
        now = self._monotonic()
        waiting: dict[str, float] = {}  # by namespace: since when its newest pod waits
        for pod, since in self._creating.values():
            if now - since >= PATIENCE_SECONDS:
                waiting[pod.namespace] = max(since, waiting.get(pod.namespace, since))
        self._next = {name: at for name, at in self._next.items() if name in waiting or at > now}
        for namespace, since in waiting.items():
            if now < self._next.get(namespace, now):
                continue
            is_new = now - since < OLD_PODS_EVERY_SECONDS
            self._next[namespace] = now + (0.0 if is_new else OLD_PODS_EVERY_SECONDS)
            try:
                self._learn(namespace, await self._list(namespace))
            except Forbidden as exc:
                self._next[namespace] = now + REFUSED_EVERY_SECONDS
                log.warning("events may not be read: failed mounts are not named", namespace=namespace, error=str(exc))
            except (KubeError, msgspec.MsgspecError) as exc:
                self._next[namespace] = now + OLD_PODS_EVERY_SECONDS
                log.info("events were not listed", namespace=namespace, error=str(exc))

    async def _list(self, namespace: str) -> list[Event]:
        events: list[Event] = []
        for reason in REASONS:
            selector = {"fieldSelector": f"type=Warning,reason={reason}", "limit": str(MOST_EVENTS)}
            answer = await self._client.get(EVENTS.path(namespace), selector)
            events.extend(msgspec.json.decode(answer, type=EventList).items)
        return events

    def _learn(self, namespace: str, events: list[Event]) -> None:
        sentences = _newest(events, self._now() - CURRENT)
        for uid, (pod, _) in list(self._creating.items()):
            if pod.namespace != namespace:
                continue
            before, after = self._found.get(uid, ""), sentences.get(uid, "")
            if after:
                self._found[uid] = after
            else:
                self._found.pop(uid, None)
            if before != after:
                self._on_news(pod)


def is_mounting(pod: Pod) -> bool:
    """Whether the kubelet may still have volumes of the pod to mount: it has started no container, and no sandbox."""
    sandbox = pod.condition("PodReadyToStartContainers")
    has_sandbox = sandbox is not None and sandbox.status == "True"
    return bool(pod.spec.node_name) and not pod.is_terminating and not has_sandbox and not has_begun(pod)


def _newest(events: list[Event], after: datetime) -> Mapping[str, str]:
    """By uid of the pod: the newest sentence since `after`; one that names the cause before a summary."""
    chosen: dict[str, tuple[bool, datetime, str]] = {}
    for event in events:
        if event.at is None or event.at < after:
            continue
        note = " ".join(event.note.split())[:MESSAGE_SHOWN]
        candidate = (not note.startswith(_SUMMARY), event.at, note)
        chosen[event.regarding.uid] = max(candidate, chosen.get(event.regarding.uid, candidate))
    return {uid: note for uid, (_, _, note) in chosen.items()}
