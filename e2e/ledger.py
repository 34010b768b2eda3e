"""The ledger of one service's requests: what clients sent, what the gateways answered, what the replicas computed.

| counted by       | from                                                          | must be                           |
|------------------|---------------------------------------------------------------|-----------------------------------|
| the load client  | its report                                                    | sent = answered + refused + left  |
| the gateways     | their metrics, and one log line for each request              | answered = what clients got       |
| the replicas     | one log line for each request, also of replicas that are gone | one whole answer for each of them |
| running replicas | `/signals`: admitted, finished, aborted, handedOver           | admitted = the sum of the others  |

A request has one id in the gateway and in every replica that worked on it, so that an answer that was moved or handed
over is found at its last replica. Log files are followed while they are written: the kubelet removes them with the pod.
"""

import json
import threading
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from prometheus_client.parser import text_string_to_metric_families

from bench.plan import LoadReport
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, proxy_path
from slipway_api import names
from slipway_api.admin_token import admin_token

REFUSALS = frozenset(("status 429", "status 503"))  # as the load client names them: said before anything was accepted
WHOLE = frozenset(("stop", "length"))  # finish reasons of a replica
HANDED_OVER = "handed_over"
GATEWAY_ADMIN_PORT = 8001
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class GatewayRecord:
    """One request in a gateway's log."""

    request_id: str
    status: int
    finish: str
    handovers: int = 0

    @property
    def is_answered(self) -> bool:
        """Whether the client got a whole answer."""
        return self.status == 200 and self.finish != "error"


@dataclass(frozen=True)
class ReplicaRecord:
    """One answer in a replica's log, whole or not."""

    pod: str
    request_id: str
    finish: str


@dataclass(frozen=True)
class GatewayCounts:
    """The counters of one service in the metrics of all gateways."""

    answered: int = 0
    errors: int = 0
    open: int = 0  # of every service: requests inside the gateways now

    def since(self, before: "GatewayCounts") -> "GatewayCounts":
        """The difference to earlier counts."""
        return GatewayCounts(self.answered - before.answered, self.errors - before.errors, self.open)


@dataclass(frozen=True)
class ReplicaCounts:
    """The counters of one replica since its start, from `/signals`."""

    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    handed_over: int = 0
    open: int = 0  # running and waiting

    def since(self, before: "ReplicaCounts") -> "ReplicaCounts":
        """The difference to earlier counts."""
        differences = {one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)}
        return ReplicaCounts(**differences | {"open": self.open})


@dataclass(frozen=True)
class Records:
    """All that gateways and replicas recorded since the ledger was opened."""

    requests: list[GatewayRecord] = field(default_factory=list)
    answers: list[ReplicaRecord] = field(default_factory=list)
    gateways: GatewayCounts = GatewayCounts()
    replicas: Mapping[str, ReplicaCounts] = field(default_factory=dict)  # by pod, those that run now

    def summarize(self, report: LoadReport) -> str:
        """The ledger in one line."""
        ends = Counter("finished" if one.finish in WHOLE else one.finish for one in self.answers)
        replicas = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        pods = len({one.pod for one in self.answers})
        return (
            f"{report.sent} sent = {report.finished} answered + {sum(report.failures.values())} not; gateways: "
            f"{self.gateways.answered} answered; {pods} replicas: {len(self.answers)} admitted = {replicas or 'none'}"
        )


def find_losses(report: LoadReport, records: Records) -> list[str]:
    """Finds what was accepted and has no whole answer, and every count that does not agree, as sentences."""
    return [*_client_losses(report), *_gateway_losses(report, records), *_replica_losses(records)]


def _client_losses(report: LoadReport) -> Iterable[str]:
    if report.sent != report.finished + report.failed + report.left:
        yield f"client: {report.sent} sent, {report.finished} finished, {report.failed} failed, {report.left} left"
    for reason, count in report.failures.items():
        if reason not in REFUSALS:
            yield f"client: {count} lost: {reason}"


def _gateway_losses(report: LoadReport, records: Records) -> Iterable[str]:
    attempts = report.sent + report.retries_429
    if len(records.requests) != attempts:
        yield f"gateways: {len(records.requests)} requests logged, {attempts} sent"
    answered = sum(one.is_answered for one in records.requests)
    for source, count in (("logged", answered), ("counted in the metrics", records.gateways.answered)):
        if count != report.finished:
            yield f"gateways: {count} answers {source}, {report.finished} got by clients"
    if records.gateways.errors:
        yield f"gateways: {records.gateways.errors} errors counted in the metrics"
    if records.gateways.open:
        yield f"gateways: {records.gateways.open} requests still open"


def _replica_losses(records: Records) -> Iterable[str]:
    whole = Counter(one.request_id for one in records.answers if one.finish in WHOLE)
    for request in records.requests:
        if request.is_answered and whole[request.request_id] != 1:
            yield f"replicas: {whole[request.request_id]} whole answers for request {request.request_id}"
    logged: dict[str, Counter[str]] = defaultdict(Counter)
    for one in records.answers:
        end = "finished" if one.finish in WHOLE else HANDED_OVER if one.finish == HANDED_OVER else "aborted"
        logged[one.pod][end] += 1
    for pod, counts in records.replicas.items():
        ends = {"finished": counts.finished, "aborted": counts.aborted, HANDED_OVER: counts.handed_over}
        if counts.admitted != sum(ends.values()) or counts.open:
            yield f"{pod}: {counts.admitted} admitted, {counts.open} open, {ends}"
        if ends != {end: logged[pod][end] for end in ends}:
            yield f"{pod}: counted {ends}, logged {dict(logged[pod])}"


class PodLogs:
    """Follows the log files of all pods of a cluster from now on, in a thread of its own.

    Open files stay readable when the kubelet has removed or renamed them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, tuple[str, BinaryIO]] = {}  # by inode, which is not given away while it is open
        self._rests: dict[int, bytes] = {}
        self._lines: list[tuple[str, Mapping[str, Any]]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._look(from_start=False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lines(self, namespace: str) -> list[tuple[str, Mapping[str, Any]]]:
        """(pod, its line) of all lines about requests so far, of the pods of a namespace."""
        with self._lock:
            self._look()
            return [(name.split("_")[1], line) for name, line in self._lines if name.startswith(f"{namespace}_")]

    def close(self) -> None:
        """Follow no more."""
        self._ended.set()
        self._thread.join()
        for _, file in self._files.values():
            file.close()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            with self._lock:
                self._look()

    def _look(self, *, from_start: bool = True) -> None:
        with suppress(FileNotFoundError):  # a folder went while it was listed: the next look finds the others
            for path in self._folder.glob("*-pods/*/*/*.log"):
                self._open(path, from_start=from_start)
        for inode, (name, file) in self._files.items():
            *lines, self._rests[inode] = (self._rests[inode] + file.read()).split(b"\n")
            self._lines += [(name, parsed) for line in lines if (parsed := parse_line(line)) is not None]

    def _open(self, path: Path, *, from_start: bool) -> None:
        if path.stat().st_ino in self._files:
            return
        file = path.open("rb")
        inode = path.stat().st_ino
        self._files[inode], self._rests[inode] = (path.parents[1].name, file), b""
        if not from_start:
            file.seek(0, 2)


def parse_line(line: bytes) -> Mapping[str, Any] | None:
    """A line about a request, from a log file in the CRI's format; None for any other line."""
    if b'"request_id"' not in line:
        return None
    found: Mapping[str, Any] = json.loads(line.split(b" ", 3)[3])
    return found if found.get("message") == "request" else None


def _listens(pod: Any) -> bool:
    """Whether the replica has started: before that nothing answers on its ports, and nothing has been counted."""
    return all(status.started for status in pod.status.container_statuses or [])


class Ledger:
    """Records one service's requests from `open` on; nobody but one load may send any until they are compared."""

    def __init__(self, slipway: Slipway, service: str) -> None:
        self._slipway, self._service = slipway, service

    def __enter__(self) -> "Ledger":
        self._logs = PodLogs(self._slipway.access.logs)
        secret = self._slipway.core.read_namespaced_secret("slipway-admin-master", RELEASE_NAMESPACE)
        self._master = b64decode(secret.data["current"])
        self._gateways = self._gateway_restarts()
        self._counted = self._gateway_counts()
        self._replicas = self._replica_counts()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._logs.close()

    def collect(self) -> Records:
        """All records since the ledger was opened."""
        assert self._gateway_restarts() == self._gateways, "gateways were replaced or restarted: no counters"
        known = ReplicaCounts()
        replicas = {
            boot: counts.since(self._replicas.get(boot, known)) for boot, counts in self._replica_counts().items()
        }
        return Records(
            requests=[
                GatewayRecord(line["request_id"], line["status"], line["finish"], line["handovers"])
                for _, line in self._logs.lines(RELEASE_NAMESPACE)
                if line.get("service") == f"{USER_NAMESPACE}/{self._service}"
            ],
            answers=[
                ReplicaRecord(pod, line["request_id"], line["finish_reason"])
                for pod, line in self._logs.lines(USER_NAMESPACE)
                if line.get("model") == self._service
            ],
            gateways=self._gateway_counts().since(self._counted),
            replicas={pod: counts for (pod, _), counts in replicas.items()},
        )

    def _gateway_pods(self) -> list[Any]:
        selector = "app.kubernetes.io/component=gateway"
        return list(self._slipway.core.list_namespaced_pod(RELEASE_NAMESPACE, label_selector=selector).items)

    def _gateway_restarts(self) -> dict[str, int]:
        """Name -> restarts of each gateway."""
        return {pod.metadata.name: pod.status.container_statuses[0].restart_count for pod in self._gateway_pods()}

    def _gateway_counts(self) -> GatewayCounts:
        totals: Counter[str] = Counter()
        for pod in self._gateway_pods():
            path = proxy_path(pod, GATEWAY_ADMIN_PORT, names.PATH_METRICS)
            for family in text_string_to_metric_families(self._slipway.access.kubectl("get", "--raw", path)):
                for sample in family.samples:
                    if sample.labels.get("service", "") in ("", f"{USER_NAMESPACE}/{self._service}"):
                        totals[sample.name] += int(sample.value)
        errors = totals["slipway_gateway_service_errors_total"]
        return GatewayCounts(
            answered=totals["slipway_gateway_service_requests_total"] - errors,
            errors=errors,
            open=totals["slipway_gateway_open_requests"],
        )

    def _replica_counts(self) -> dict[tuple[str, str], ReplicaCounts]:
        """(pod, boot id) -> the counters of each replica that runs."""
        running = [
            pod
            for pod in self._slipway.pods(self._service)
            if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None and _listens(pod)
        ]
        counted = {}
        for pod in running:
            found = self._signals(pod)
            counted[pod.metadata.name, found["bootId"]] = ReplicaCounts(
                admitted=found["admitted"],
                finished=found["finished"],
                aborted=found["aborted"],
                handed_over=found["handedOver"],
                open=found["running"] + found["waiting"],
            )
        return counted

    def _signals(self, pod: Any) -> dict[str, Any]:
        path = proxy_path(pod, names.ADMIN_PORT, names.PATH_SIGNALS)
        nonce = (pod.metadata.annotations or {}).get(names.ANNOTATION_ADMIN_NONCE, "")
        token = admin_token(self._master, USER_NAMESPACE, pod.metadata.name, nonce)
        return self._slipway.access.api("GET", path, headers={names.HEADER_ADMIN_TOKEN: token})
