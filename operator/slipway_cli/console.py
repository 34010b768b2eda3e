"""Opens the console: `kubectl port-forward` to the admin port of a gateway, and its address with the token.

A forwarded port reaches the pod through its kubelet, so no NetworkPolicy has to let the user in. The token stands
behind the `#` of the address, which browsers do not send, and the page removes it from the address bar.
"""

import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, Final

from slipway_api import internal_tls, names
from slipway_cli.cluster import Cluster, ClusterError

_FORWARDING: Final = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) ->")
STOP_SECONDS: Final = 5.0


@contextmanager
def forwarded_console(cluster: Cluster, release_namespace: str, *, context: str = "") -> Iterator[str]:
    """The address of a ready gateway's console, while the block runs."""
    pod = _ready_gateway(cluster, release_namespace)
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    token = cluster.gateway_token(pod)
    command = ["kubectl", "port-forward", "--address", "127.0.0.1", "--namespace", namespace]
    command += ["--kubeconfig", cluster.kubeconfig] if cluster.kubeconfig else []
    command += ["--context", context] if context else []
    try:
        forward = subprocess.Popen(
            [*command, f"pod/{name}", f":{names.ADMIN_PORT}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except FileNotFoundError:
        raise ClusterError("kubectl is not on the PATH. Install it, or add its folder to the PATH.") from None
    try:
        assert forward.stdout is not None
        lines: list[bytes] = []
        for line in forward.stdout:
            lines.append(line)
            if _FORWARDING.match(line):
                break
        started = _FORWARDING.match(lines[-1]) if lines else None
        if started is None:
            cause = " ".join(b" ".join(lines).decode("utf-8", "replace").split())[:500] or "it ended without a message"
            raise ClusterError(f"kubectl port-forward to {namespace}/{name} failed: {cause}")
        # It writes a line for each connection, and would stop if nobody read them.
        threading.Thread(target=_discard, args=(forward.stdout,), daemon=True).start()
        yield f"{_scheme(pod)}://127.0.0.1:{started[1].decode()}/console#token={token}"
    finally:
        forward.terminate()
        try:
            forward.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            forward.kill()
            forward.wait()


def _scheme(pod: Mapping[str, Any]) -> str:
    """A browser does not know the installation's own authority, and asks whether to go on."""
    return "https" if any(one["name"] == internal_tls.VOLUME for one in pod["spec"].get("volumes") or ()) else "http"


def _discard(lines: IO[bytes]) -> None:
    with suppress(ValueError):  # closed
        for _ in lines:
            pass


def wait_for_interrupt() -> None:
    """Return after Ctrl-C or a TERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _ready_gateway(cluster: Cluster, namespace: str) -> dict[str, Any]:
    pods = cluster.installation_pods(namespace)
    gateways = [
        pod for pod in pods if pod["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "gateway"
    ]
    for pod in gateways:
        conditions = pod.get("status", {}).get("conditions") or ()
        if any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
            return pod
    if gateways:
        raise ClusterError(f"no gateway in {namespace} is ready. Run kubectl describe pods -n {namespace}.")
    raise ClusterError(
        f"the namespace {namespace} has no gateway. Name the namespace of the installation with --release-namespace."
    )
