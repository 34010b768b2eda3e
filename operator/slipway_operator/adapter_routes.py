"""Writes the annotation by which the gateway routes adapters to a pod: changes of one pod in one patch, in turn."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from slipway_api import names
from slipway_api.types import ServiceKey
from slipway_kube.errors import KubeError, StatusError
from slipway_kube.objects import Pod
from slipway_kube.resources import PODS
from slipway_kube.writer import Writer

log = structlog.get_logger()

GATHER_SECONDS: Final = 0.05  # changes within so long are one write
PAUSE_SECONDS: Final = 4.0  # after a refused write; the plan repeats it after 5 s
SHOWN_SECONDS: Final = 5.0  # until the caches show a write; afterwards the plan may repeat it


@dataclass(slots=True)
class _Changes:
    """The changes of one pod that the caches do not show yet: adapter -> whether it is to be routed."""

    service: ServiceKey
    pod: str
    wanted: dict[str, bool]
    is_writing: bool = False


class PodRoutes:
    """The routing annotations of all pods."""

    def __init__(
        self,
        writer: Writer,
        pod_of: Callable[[str, str], Pod | None],
        *,
        on_written: Callable[[ServiceKey, frozenset[str]], None],
    ) -> None:
        """`pod_of` finds a cached pod; `on_written` is called when the caches show a write, or it failed."""
        self._writer = writer
        self._pod_of = pod_of
        self._on_written = on_written
        self._pods: dict[str, _Changes] = {}
        self._failures: dict[str, tuple[str, float]] = {}  # by uid: the error, and until when nothing is written
        self._tasks: set[asyncio.Task[None]] = set()

    def is_changing(self, uid: str, adapter: str) -> bool:
        """Whether a change of this adapter is under way."""
        changes = self._pods.get(uid)
        return changes is not None and adapter in changes.wanted

    def change(self, service: ServiceKey, pod: str, uid: str, adapter: str, *, is_routed: bool) -> None:
        """Add the adapter to the pod's annotation, or remove it, in a moment; not soon after a refusal."""
        if asyncio.get_running_loop().time() < self._failures.get(uid, ("", 0.0))[1]:
            return
        changes = self._pods.setdefault(uid, _Changes(service, pod, {}))
        changes.wanted[adapter] = is_routed
        if not changes.is_writing:
            changes.is_writing = True
            task = asyncio.create_task(self._write_all(uid, changes), name=f"adapters of {pod}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def failure(self, uid: str) -> str:
        """Why the annotation of this pod could not be written the last time; empty: it could."""
        return self._failures.get(uid, ("", 0.0))[0]

    def forget(self, uid: str) -> None:
        """Forget a pod that is deleted."""
        self._failures.pop(uid, None)
        self._pods.pop(uid, None)

    async def stop(self) -> None:
        """Cancel what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_all(self, uid: str, changes: _Changes) -> None:
        """Write until no change is left; those that come during a write are in the next one."""
        while changes.wanted:
            await asyncio.sleep(GATHER_SECONDS)
            now = dict(changes.wanted)
            try:
                await self._write(uid, changes, now)
                self._failures.pop(uid, None)
            except KubeError as exc:
                is_lasting = isinstance(exc, StatusError) and exc.status < 500 and exc.status not in (404, 409, 429)
                until = asyncio.get_running_loop().time() + PAUSE_SECONDS
                self._failures[uid] = (str(exc) if is_lasting else "", until)
                log.info("the pod's adapters are not written; the plan repeats it", pod=changes.pod, error=str(exc))
            changes.wanted = {one: on for one, on in changes.wanted.items() if now.get(one) is not on}
            self._on_written(changes.service, frozenset(now))
        changes.is_writing = False
        if self._pods.get(uid) is changes:
            del self._pods[uid]

    async def _write(self, uid: str, changes: _Changes, now: dict[str, bool]) -> None:
        namespace = changes.service.namespace
        pod = self._pod_of(namespace, changes.pod)
        if pod is None or pod.uid != uid:
            return
        before = routed_adapters(pod)
        after = (before | {one for one, on in now.items() if on}) - {one for one, on in now.items() if not on}
        if after == before:
            return
        metadata: dict[str, Any] = {
            "name": changes.pod,
            "namespace": namespace,
            "uid": uid,  # so that a deleted pod is never created anew
            "annotations": {names.ANNOTATION_ADAPTERS: ",".join(sorted(after))},
        }
        await self._writer.apply(
            PODS, namespace, changes.pod, {"metadata": metadata}, field_manager=names.FIELD_MANAGER_ADAPTERS
        )
        await self._wait_until_shown(uid, changes, after)

    async def _wait_until_shown(self, uid: str, changes: _Changes, wanted: frozenset[str]) -> None:
        """Return when the cached pod has the annotation: the next write starts from it."""
        for _ in range(int(SHOWN_SECONDS / GATHER_SECONDS)):
            pod = self._pod_of(changes.service.namespace, changes.pod)
            if pod is None or pod.uid != uid or routed_adapters(pod) == wanted:
                return
            await asyncio.sleep(GATHER_SECONDS)


def routed_adapters(pod: Pod) -> frozenset[str]:
    """The adapters that the pod's annotation names."""
    return frozenset(filter(None, pod.metadata.annotations.get(names.ANNOTATION_ADAPTERS, "").split(",")))
