"""Installs and uses Slipway on the local cluster as a user does: helm, kubectl, the OpenAI client, and load.

The demo and the stories are written with it; what they assert is the state of the cluster.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import openai
from kubernetes import client

from bench.load import run_load
from bench.plan import LoadPlan, LoadReport, Progress
from e2e.cluster.access import Access
from e2e.cluster.launch import Cluster
from slipway_api import internal_tls, names

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "slipway"
EXAMPLES = ROOT / "examples"
RELEASE_NAMESPACE = "slipway-system"
USER_NAMESPACE = "default"
PLURAL = "inferenceservices"
PLURALS = {"InferenceService": PLURAL, "LoRAAdapter": "loraadapters", "WarmPool": "warmpools"}
GATEWAY = "gateway"

RELEARNING = timedelta(seconds=10)  # of its roles, by an API server that has just started

Json = dict[str, Any]


class NotInTimeError(AssertionError):
    """Something that should have become true did not; the message has what was seen last."""


def wait_for(what: str, look: Callable[[], T | None], timeout: float = 60, every: float = 0.2) -> T:
    """The first answer of `look` that is not None or False; raises NotInTimeError with its last exception or value."""
    deadline = time.monotonic() + timeout
    last: object = None
    while time.monotonic() < deadline:
        try:
            answer = look()
        except Exception as exc:  # noqa: BLE001  the world may not be there yet; the last reason is in the message
            last = exc
        else:
            if answer:
                return answer
            last = answer
        time.sleep(every)
    raise NotInTimeError(f"not within {timeout:.0f} s: {what} (last seen: {last!r})")


def speaks_tls(pod: Any) -> bool:
    """Whether the pod was created with a certificate of internal TLS; its ports then speak nothing else."""
    return any(volume.name == internal_tls.VOLUME for volume in pod.spec.volumes)


def proxy_path(pod: Any, port: int, path: str) -> str:
    """A path on a port of the pod, through the API server; it does not verify certificates of pods."""
    scheme = "https:" if speaks_tls(pod) else ""
    return f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{scheme}{pod.metadata.name}:{port}/proxy{path}"


@dataclass(frozen=True)
class Event:
    """A Kubernetes event; the official client refuses some that are valid, so it is parsed from JSON here."""

    type: str
    reason: str
    note: str
    at: datetime  # when it was last seen
    uid: str

    @classmethod
    def of(cls, raw: Json) -> "Event":
        """From the API server's JSON."""
        series, first = raw.get("series") or {}, raw.get("eventTime") or raw["metadata"]["creationTimestamp"]
        return cls(
            type=raw.get("type", ""),
            reason=raw.get("reason", ""),
            note=raw.get("note", ""),
            at=datetime.fromisoformat(series.get("lastObservedTime") or first),
            uid=raw["metadata"]["uid"],
        )


class Slipway:
    """One installation on one cluster."""

    def __init__(self, access: Access) -> None:
        self.access = access
        api = access.client()
        self.core = client.CoreV1Api(api)
        self.apps = client.AppsV1Api(api)
        self.objects = client.CustomObjectsApi(api)
        self.api_key = "none"  # of `openai`; ignored unless tenants are configured
        self.outages: list[tuple[datetime, datetime]] = []  # of the API server, until it knows its roles again

    # Installing

    def install(self, *settings: str) -> None:
        """`helm install` of the chart; returns when operator and gateway are up, and admission knows the kind."""
        sets = [part for setting in settings for part in ("--set", setting)]
        self.access.helm(
            "upgrade", "--install", "slipway", str(CHART),
            "--namespace", RELEASE_NAMESPACE, "--create-namespace", "--reset-values", "--wait", "--timeout", "180s",
            *sets,
        )  # fmt: skip
        wait_for("owners of the new kind are admitted", self.admits_owners, timeout=60)

    def admits_owners(self) -> bool:
        """OwnerReferencesPermissionEnforcement learns of a new kind only every few seconds, and refuses until then.

        Cluster administrators are exempt from it, so the request is made as the operator.
        """
        owner = {"apiVersion": names.API_VERSION, "kind": "InferenceService", "name": "nobody", "uid": "0"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "generateName": "probe-",
                "ownerReferences": [owner | {"blockOwnerDeletion": True, "controller": True}],
            },
            # As the policies of the chart demand of the operator's pods.
            "spec": {
                "automountServiceAccountToken": False,
                "securityContext": {"runAsNonRoot": True},
                "containers": [
                    {"name": "probe", "image": "probe", "securityContext": {"allowPrivilegeEscalation": False}}
                ],
            },
        }
        account = f"--as=system:serviceaccount:{RELEASE_NAMESPACE}:slipway-operator"
        where = f"--namespace={USER_NAMESPACE}"
        self.access.kubectl("create", "--dry-run=server", account, where, "-f", "-", stdin=json.dumps(pod))
        return True

    # Services

    def apply(self, manifest: Path | str) -> str:
        """`kubectl apply`; what kubectl printed."""
        if isinstance(manifest, Path):
            return self.access.kubectl("apply", "-f", str(manifest))
        return self.access.kubectl("apply", "-f", "-", stdin=manifest)

    def service(self, name: str, namespace: str = USER_NAMESPACE) -> Json:
        """The InferenceService as the API server has it now."""
        return self.custom("InferenceService", name, namespace)

    def custom(self, kind: str, name: str, namespace: str = USER_NAMESPACE) -> Json:
        """An object of one of Slipway's kinds as the API server has it now."""
        plural = PLURALS[kind]
        found: Json = self.objects.get_namespaced_custom_object(names.GROUP, names.VERSION, namespace, plural, name)
        return found

    def services(self, namespace: str = USER_NAMESPACE) -> list[str]:
        """The names of all services."""
        listing = self.objects.list_namespaced_custom_object(names.GROUP, names.VERSION, namespace, PLURAL)
        return [item["metadata"]["name"] for item in listing["items"]]

    def condition(self, name: str, kind: str, namespace: str = USER_NAMESPACE) -> Json | None:
        """One condition of the service, or None where it is absent."""
        conditions = self.service(name, namespace).get("status", {}).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), None)

    def wait_condition(self, name: str, type: str, status: str, reason: str = "") -> Json:
        """The service's condition once it has this status, and this reason where one is given."""

        def look() -> Json | None:
            found = self.condition(name, type) or {}
            is_so = found.get("status") == status and reason in ("", found.get("reason"))
            return found if is_so else None

        return wait_for(f"{type}={status} {reason} of {name}", look)

    def wait_ready(self, name: str, replicas: int | None = None, timeout: float = 120) -> Json:
        """The service once it is Ready for its newest generation, with `replicas` ready when that is given."""

        def look() -> Json | None:
            service = self.service(name)
            status = service.get("status", {})
            conditions = {c["type"]: c for c in status.get("conditions", [])}
            current = status.get("observedGeneration") == service["metadata"]["generation"]
            ready = conditions.get("Ready", {}).get("status") == "True"
            count = replicas is None or (status.get("readyReplicas"), status.get("replicas")) == (replicas, replicas)
            return service if current and ready and count else None

        try:
            return wait_for(f"{name} Ready with {replicas or 'its'} replicas", look, timeout)
        except NotInTimeError as exc:
            raise NotInTimeError(f"{exc}\n{self.story(name)}") from None

    def delete(self, name: str, timeout: float = 120) -> None:
        """`kubectl delete` of the service; returns when it and its pods are gone."""
        self.access.kubectl("delete", "infsvc", name, "--ignore-not-found", "--wait=false")
        wait_for(f"{name} gone", lambda: self.is_gone(name), timeout)

    def is_gone(self, name: str) -> bool:
        """Neither the service nor a pod of it exists."""
        try:
            self.service(name)
        except client.ApiException as exc:
            return exc.status == 404 and not self.pods(name)
        return False

    def pods(self, name: str, namespace: str = USER_NAMESPACE) -> list[Any]:
        """The service's pods, those being deleted included."""
        selector = f"{names.LABEL_SERVICE}={name}"
        return list(self.core.list_namespaced_pod(namespace, label_selector=selector).items)

    def events(self, name: str, namespace: str = USER_NAMESPACE, *, kind: str = "InferenceService") -> list[Event]:
        """Slipway's events about the service, or about an object of another kind, oldest first."""
        about = f"regarding.kind={kind},regarding.name={name}"  # its Service and its budget share the name
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events?fieldSelector={about}"
        items = self.access.api("GET", path)["items"]
        return sorted(map(Event.of, items), key=lambda event: event.at)

    def wait_events(self, name: str, *reasons: str, kind: str = "InferenceService") -> list[Event]:
        """All its events, oldest first, once each of these reasons is among them: they are posted after the status."""

        def look() -> list[Event] | None:
            events = self.events(name, kind=kind)
            return events if set(reasons) <= {event.reason for event in events} else None

        return wait_for(f"the events {', '.join(reasons)} of {name}", look)

    def notes(self, name: str, reason: str) -> list[str]:
        """The notes of the service's events with this reason, oldest first, once there is one."""
        return [event.note for event in self.wait_events(name, reason) if event.reason == reason]

    def story(self, name: str) -> str:
        """Status and events in a few lines, for a failure message."""
        status = self.service(name).get("status", {})
        lines = [f"status: {json.dumps(status, indent=1)}"]
        lines += [f"event: {e.type} {e.reason}: {e.note}" for e in self.events(name)]
        lines += [f"pod: {p.metadata.name} {p.status.phase} {p.metadata.labels}" for p in self.pods(name)]
        return "\n".join(lines)

    # The operator

    def leader(self) -> str:
        """The name of the operator pod that holds the Lease."""
        lease = client.CoordinationV1Api(self.core.api_client).read_namespaced_lease(
            "slipway-operator", RELEASE_NAMESPACE
        )
        return str(lease.spec.holder_identity or "").split("_")[0]

    def logs(self, selector: str, namespace: str = RELEASE_NAMESPACE) -> str:
        """The logs of all pods behind the selector, previous containers left out."""
        pods = self.core.list_namespaced_pod(namespace, label_selector=selector).items
        return "\n".join(self.core.read_namespaced_pod_log(p.metadata.name, namespace) for p in pods)

    @contextmanager
    def api_server_away(self, cluster: Cluster) -> Iterator[None]:
        """The API server is down inside the block. Once back, it refuses every request until it has read its roles."""
        with self._outage(cluster.stop_apiserver, cluster.start_apiserver):
            yield

    @contextmanager
    def etcd_away(self, cluster: Cluster) -> Iterator[None]:
        """etcd is down inside the block: the API server runs, and can neither read nor write."""
        with self._outage(cluster.stop_etcd, cluster.start_etcd):
            yield

    @contextmanager
    def _outage(self, stop: Callable[[], None], start: Callable[[], None]) -> Iterator[None]:
        started = datetime.now(UTC)
        stop()
        try:
            yield
        finally:
            start()
            wait_for("the API server is back", lambda: self.core.list_node().items)
            self.outages.append((started, datetime.now(UTC) + RELEARNING))

    def was_away(self, at: datetime) -> bool:
        """Whether the API server was down then, or had not read its roles again."""
        return any(start <= at <= end for start, end in self.outages)

    # Clients

    @property
    def base_url(self) -> str:
        """The gateway's URL for clients outside the cluster."""
        return f"http://127.0.0.1:{self.access.port(GATEWAY)}/v1"

    def openai(self) -> openai.OpenAI:
        """The stock client, pointed at the gateway; it does not retry, so what it meets is what happened."""
        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, timeout=120, max_retries=0)

    def load(
        self, model: str, *, concurrency: int, seconds: float, max_tokens: int = 64, retry_429: bool = False
    ) -> "Load":
        """Start load in the background. First attempts count, unless `retry_429` says that overload is expected."""
        plan = LoadPlan(
            base_url=self.base_url,
            model=model,
            concurrency=concurrency,
            duration_seconds=seconds,
            max_tokens=max_tokens,
            retry_429=retry_429,
        )
        return Load(plan)


class Load:
    """A load run in a thread of its own; stopping it lets running streams finish."""

    def __init__(self, plan: LoadPlan) -> None:
        self.progress = Progress()
        self._report: LoadReport | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(plan,), daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self, plan: LoadPlan) -> None:
        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._ready.set()
            self._report = await run_load(plan, stop=self._stop, on_progress=self._note)

        try:
            asyncio.run(main())
        except BaseException as exc:  # noqa: BLE001  raised again by `report`
            self._error = exc
            self._ready.set()

    def _note(self, progress: Progress) -> None:
        self.progress = progress

    def stop(self) -> LoadReport:
        """Send no more, wait for running streams, and return the report."""
        self._loop.call_soon_threadsafe(self._stop.set)
        return self.report()

    def report(self) -> LoadReport:
        """Wait until the run is over, and return the report."""
        self._thread.join(timeout=600)
        if self._error is not None:
            raise self._error
        assert self._report is not None, "the load did not end within ten minutes"
        return self._report
