"""TLS between the parts on the local cluster: what a port answers to a caller inside the cluster's network."""

import base64
import json
import sys
from typing import Any, Final

from e2e.cluster.launch import Cluster
from e2e.slipway import RELEASE_NAMESPACE, USER_NAMESPACE, Slipway, wait_for
from slipway_api import internal_tls

ENABLED: Final = "internalTLS.enabled=true"

# Arguments: address, port, name to verify (empty: plain text), trusted certificates (empty: those of the machine).
_CALL: Final = """
import http.client, json, socket, ssl, sys
address, port, name, authorities = sys.argv[1:]
connection = http.client.HTTPConnection(address, int(port), timeout=10)
found = {}
try:
    if name:
        context = ssl.create_default_context(cadata=authorities or None)
        connection.sock = context.wrap_socket(socket.create_connection((address, int(port)), 10), server_hostname=name)
        found["serial"] = connection.sock.getpeercert()["serialNumber"]
    connection.request("GET", "/health")
    found["status"] = connection.getresponse().status
except (OSError, http.client.HTTPException) as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def call(cluster: Cluster, address: str, port: int, *, name: str = "", authorities: str = "") -> dict[str, Any]:
    """GET /health from inside the cluster: status and serial number of the certificate, or the error.

    Without a name it is sent in plain text.
    """
    answer: dict[str, Any] = json.loads(cluster.run(sys.executable, "-c", _CALL, address, str(port), name, authorities))
    return answer


def authorities(slipway: Slipway) -> str:
    """The certificates that the installation publishes for its gateways."""
    name = internal_tls.authority_name("slipway")
    found = slipway.core.read_namespaced_config_map(name, RELEASE_NAMESPACE)
    return str(found.data[internal_tls.CA_FILE])


def certificate(slipway: Slipway, namespace: str = USER_NAMESPACE) -> bytes:
    """The present certificate of the replicas of a namespace."""
    found = slipway.core.read_namespaced_secret(internal_tls.REPLICAS_SECRET, namespace)
    return base64.b64decode(found.data[internal_tls.CERTIFICATE_FILE])


def renew(slipway: Slipway) -> None:
    """Have the certificate of the replicas issued anew, as docs/install.md describes for one that has leaked."""
    before = certificate(slipway)
    slipway.access.kubectl("delete", "secret", internal_tls.REPLICAS_SECRET, "-n", USER_NAMESPACE)
    slipway.access.kubectl("rollout", "restart", "deployment/slipway-operator", "-n", RELEASE_NAMESPACE)
    wait_for("another certificate", lambda: certificate(slipway) != before, timeout=120)
