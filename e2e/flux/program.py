"""Runs one of Flux's controllers on the host against a local cluster, with a server of artifacts."""

import contextlib
import signal
import subprocess
from typing import Any, Self

from e2e.cluster.access import Access, ApiError
from e2e.flux import build
from e2e.flux.artifacts import ArtifactServer

NAMESPACE = "flux-system"
FLAGS = (
    "--metrics-addr=0",
    "--health-addr=0",
    "--enable-leader-election=false",
    "--interval-jitter-percentage=0",
    "--feature-gates=ExternalArtifact=true",
)
SECONDS_TO_STOP = 20

Json = dict[str, Any]


class RunningController:
    """The real program, its kinds in the cluster, and the sources that it reads; a context manager."""

    def __init__(self, access: Access, controller: build.Controller) -> None:
        self.access = access
        self.log = access.logs / f"{controller.program}.log"
        self.artifacts = ArtifactServer()
        self._program_file = controller.program
        self._build = build.ensure(controller)
        self._program: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.artifacts.start()
        try:
            self.access.serve_kinds(self._build / "crds")
            self.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            with self.log.open("ab") as log:
                self._program = subprocess.Popen(
                    [self._build / self._program_file, *FLAGS],
                    env=self.access.environment() | {"RUNTIME_NAMESPACE": NAMESPACE},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def create(self, path: str, body: Json) -> None:
        """Create an object, unless it exists."""
        with contextlib.suppress(ApiError):
            self.access.api("POST", path, body)

    def _stop(self) -> None:
        self.artifacts.stop()
        if self._program is not None:
            self._program.send_signal(signal.SIGTERM)
            try:
                self._program.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self._program.kill()
                self._program.wait()
