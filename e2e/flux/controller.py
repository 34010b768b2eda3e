"""Runs Flux's controllers on the host against a local cluster, and serves them the artifacts of their sources.

    with KustomizeController(cluster) as flux:
        flux.publish({"chat.yaml": manifest})
        flux.sync("fleet", prune=True, wait=True)

The controllers are the real programs. What stands in for source-controller is an ExternalArtifact,
the kind by which Flux lets any other program provide a source: an HTTP server on loopback has the
tarball, and the object's status names its address and digest.
"""

import contextlib
import gzip
import hashlib
import io
import signal
import subprocess
import tarfile
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from e2e.cluster.access import Access, ApiError
from e2e.flux import build

NAMESPACE = "flux-system"
SOURCE = "fleet"
KUSTOMIZATIONS = f"/apis/kustomize.toolkit.fluxcd.io/v1/namespaces/{NAMESPACE}/kustomizations"
ARTIFACTS = f"/apis/source.toolkit.fluxcd.io/v1/namespaces/{NAMESPACE}/externalartifacts"
FLAGS = (
    "--metrics-addr=0",
    "--health-addr=0",
    "--enable-leader-election=false",
    "--interval-jitter-percentage=0",
)
SECONDS_TO_STOP = 20

Json = dict[str, Any]


class ArtifactServer:
    """An HTTP server on loopback with the artifacts of sources, each at a path made of its digest."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self._bodies))

    def start(self) -> None:
        """Serve, in a thread of its own."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Serve no more; only after `start`."""
        self._server.shutdown()
        self._server.server_close()

    def add(self, tarball: bytes, version: str = "main") -> Json:
        """Serve a tarball; returns it as Flux's `status.artifact` describes it, with the version in its revision."""
        digest = hashlib.sha256(tarball).hexdigest()
        self._bodies[f"/{digest}.tar.gz"] = tarball
        return {
            "url": f"http://127.0.0.1:{self._server.server_port}/{digest}.tar.gz",
            "path": f"{digest}.tar.gz",
            "revision": f"{version}@sha256:{digest}",
            "digest": f"sha256:{digest}",
            "size": len(tarball),
            "lastUpdateTime": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }


class Controller:
    """A running controller of Flux, and the server of the artifacts that its sources name."""

    def __init__(self, access: Access, program: build.Program, *flags: str) -> None:
        self.access = access
        self.log = access.logs / f"{program.name}.log"
        self.artifacts = ArtifactServer()
        self._build = build.ensure(program)
        self._command = [self._build / program.name, *FLAGS, *flags]
        self._program: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.artifacts.start()
        try:
            self.access.serve_kinds(self._build / "crds")
            with contextlib.suppress(ApiError):  # it is there already
                self.access.api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            with self.log.open("ab") as log:
                self._program = subprocess.Popen(
                    self._command,
                    env=self.access.environment() | {"RUNTIME_NAMESPACE": NAMESPACE},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self.artifacts.stop()
        if self._program is not None:
            self._program.send_signal(signal.SIGTERM)
            try:
                self._program.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self._program.kill()
                self._program.wait()


class KustomizeController(Controller):
    """The running kustomize-controller, its one source, and the Kustomizations that apply from it."""

    def __init__(self, access: Access) -> None:
        super().__init__(access, build.KUSTOMIZE, "--feature-gates=ExternalArtifact=true")

    def publish(self, files: Mapping[str, str]) -> str:
        """A new revision of the source, of these files (name -> content); returns the revision."""
        artifact = self.artifacts.add(tarball_of(files))
        source = {
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "ExternalArtifact",
            "metadata": {"name": SOURCE, "namespace": NAMESPACE},
        }
        with contextlib.suppress(ApiError):  # it is there already
            self.access.api("POST", ARTIFACTS, source)
        self.access.api("PATCH", f"{ARTIFACTS}/{SOURCE}/status", {"status": {"artifact": artifact}})
        return str(artifact["revision"])

    def sync(self, name: str, namespace: str, *, timeout: str = "2m", **spec: Any) -> None:
        """Create the Kustomization that keeps `namespace` as the source says, pruning, and waiting for health."""
        body: Json = {
            "apiVersion": "kustomize.toolkit.fluxcd.io/v1",
            "kind": "Kustomization",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "sourceRef": {"kind": "ExternalArtifact", "name": SOURCE},
                "targetNamespace": namespace,
                "interval": "1h",  # a test asks for each reconciliation
                "retryInterval": "1h",
                "timeout": timeout,
                "prune": True,
                "wait": True,
            }
            | spec,
        }
        self.access.api("POST", KUSTOMIZATIONS, body)

    def request(self, name: str) -> str:
        """Ask for a reconciliation as `flux reconcile` does; returns what status will name once it was handled."""
        body, moment = reconcile_now()
        self.access.api("PATCH", f"{KUSTOMIZATIONS}/{name}", body)
        return moment

    def kustomization(self, name: str) -> Json:
        """The Kustomization as the API server has it now."""
        return self.access.api("GET", f"{KUSTOMIZATIONS}/{name}")

    def condition(self, name: str, kind: str) -> Json:
        """One condition of the Kustomization; empty where it is absent."""
        conditions = self.kustomization(name).get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def is_ready(self, name: str, revision: str) -> bool:
        """Whether this revision was applied, and everything in it became healthy."""
        status = self.kustomization(name).get("status", {})
        ready = self.condition(name, "Ready")
        return bool(ready.get("status") == "True" and status.get("lastAppliedRevision") == revision)

    def was_handled(self, name: str, moment: str) -> bool:
        """Whether the requested reconciliation is over."""
        status = self.kustomization(name).get("status", {})
        return bool(status.get("lastHandledReconcileAt") == moment and not self.condition(name, "Reconciling"))

    def delete(self, name: str, limit: float = 120) -> None:
        """Delete the Kustomization; returns when the controller has pruned what it applied."""
        self.access.kubectl("delete", "kustomizations", name, "-n", NAMESPACE, "--ignore-not-found", timeout=limit)


def reconcile_now() -> tuple[Json, str]:
    """The patch with which `flux reconcile` asks for a reconciliation, and what status names once it was handled."""
    moment = datetime.now(UTC).isoformat()
    return {"metadata": {"annotations": {"reconcile.fluxcd.io/requestedAt": moment}}}, moment


def tarball_of(files: Mapping[str, str]) -> bytes:
    """A tar.gz of the files; the same files make the same bytes."""
    packed = io.BytesIO()
    # Without the time that gzip would write down.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content.encode()), 0o644
            tar.addfile(member, io.BytesIO(content.encode()))
    return packed.getvalue()


def _handler_of(tarballs: Mapping[str, bytes]) -> type[BaseHTTPRequestHandler]:
    """A request handler that serves these bodies by their paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = tarballs.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not logged; the controller logs what it fetches."""

    return Handler
