"""Gives access to a running cluster from the host: its API, kubectl, helm, and its published ports.

An `Access` needs only the cluster's folder, so any process may hold one: the launcher
itself (`launch.Cluster` is one), a demo that runs beside it, a test.
"""

import json
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

STATE = "state.json"  # written when the API server is ready, removed with the folder


class CommandError(RuntimeError):
    """kubectl or helm ended with an error; the message is its stderr."""

    def __init__(self, argv: list[str], code: int, stdout: str, stderr: str) -> None:
        super().__init__(f"{' '.join(argv)}: exit {code}: {stderr.strip() or stdout.strip()}")
        self.code, self.stdout, self.stderr = code, stdout, stderr


class ApiError(RuntimeError):
    """The API server refused; `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Access:
    """A running cluster, seen from the host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @classmethod
    def attach(cls, folder: Path) -> "Access":
        """The cluster that another process runs in `folder`."""
        access = cls(folder)
        if not (access.folder / STATE).exists():
            raise SystemExit(f"no cluster is running in {folder}")
        return access

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for clients on the host."""
        return self.folder / "admin.kubeconfig"

    @property
    def logs(self) -> Path:
        """Logs of the components, `audit.jsonl`, and one folder a node with its pods' logs."""
        return self.folder / "logs"

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """The addresses and certificates that the launcher wrote when the API server was ready."""
        written: dict[str, Any] = json.loads((self.folder / STATE).read_text())
        return written

    @property
    def url(self) -> str:
        """URL of the API server on the host."""
        return f"https://127.0.0.1:{self.port('api')}"

    @property
    def tools(self) -> Path:
        """Folder with the commands `kubectl` and `helm`, to put on a PATH."""
        return Path(self.state["tools"])

    def port(self, published: str) -> int:
        """The port on 127.0.0.1 of something published: `api`, or a name given to `publish`."""
        port: int = self.state["ports"][published]
        return port

    def kubectl(self, *args: str | Path, stdin: str | None = None, timeout: float = 120) -> str:
        """Run kubectl as the administrator and return its output; raise `CommandError` when it fails."""
        return self._tool("kubectl", *args, stdin=stdin, timeout=timeout)

    def helm(self, *args: str | Path, stdin: str | None = None, timeout: float = 300) -> str:
        """Run helm as the administrator and return its output; raise `CommandError` when it fails."""
        return self._tool("helm", *args, stdin=stdin, timeout=timeout)

    def environment(self) -> dict[str, str]:
        """The variables with which kubectl, helm and other clients find this cluster and nothing of the user's."""
        home = self.folder / "home"
        return {
            "PATH": f"{self.tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "HELM_CACHE_HOME": str(home / "helm"),
            "KUBECONFIG": str(self.kubeconfig),
        }

    def _tool(self, name: str, *args: str | Path, stdin: str | None, timeout: float) -> str:
        argv = [str(self.tools / name), *map(str, args)]
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout, env=self.environment(), check=False
        )
        if done.returncode:
            raise CommandError([name, *argv[1:]], done.returncode, done.stdout, done.stderr)
        return done.stdout

    def client(self) -> "ApiClient":
        """A new client of the official library, as the administrator."""
        from kubernetes import config  # heavy, and rarely used

        return config.new_client_from_config(config_file=str(self.kubeconfig))

    def api(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout: float = 10,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """One call of the API as the administrator, without a client library; raise `ApiError` when refused."""
        data = None if body is None else json.dumps(body).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        sent = {"Content-Type": kind, **(headers or {})}
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=self._tls) as answer:
                answered: dict[str, Any] = json.load(answer)
                return answered
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(error.code, _message(error.read())) from None

    def is_ready(self) -> bool:
        """Whether the API server says that it is ready, which includes the roles of Kubernetes' own parts."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5, context=self._tls) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        pki = self.folder / "pki"
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        return context

    def create_namespace(self, prefix: str = "test", restricted: bool = False) -> str:
        """Create a namespace with an unused name; return the name."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        labels = {"pod-security.kubernetes.io/enforce": "restricted"} if restricted else {}
        self.api("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        return name

    def serve_kinds(self, folder: Path, limit: float = 30) -> None:
        """Apply the CRDs in a folder; return when their kinds can be listed.

        `kubectl wait` fails on a CRD that has no conditions yet, and the first lists of a new kind may be refused.
        """
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", folder)  # helm may have made them
        crds = [json.loads(self.kubectl("get", "-f", file, "-o", "json")) for file in sorted(folder.glob("*.yaml"))]
        deadline = time.monotonic() + limit
        for spec in (crd["spec"] for crd in crds):
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            while True:
                try:
                    self.api("GET", path)
                    break
                except ApiError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)

    def audit(self) -> Iterator[dict[str, Any]]:
        """The API server's audit log so far: user, request and status of each event."""
        with (self.logs / "audit.jsonl").open() as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may be in the middle of being written
                    yield json.loads(line)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
