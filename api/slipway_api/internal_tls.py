"""TLS between gateway, operator and replicas (ADR 144): names of objects, files and identities.

A certificate names its namespace, not its pod: whoever may create pods in a namespace may mount its Secrets, so a
finer identity would protect nothing. The two identities are in `.internal`, which no public authority signs for.
"""

from typing import Final

VOLUME: Final = "internal-tls"  # of a pod that serves TLS; volumes of a pod cannot be changed, so it is the record
REPLICAS_SECRET: Final = "slipway-internal-tls"  # noqa: S105  a name; of type kubernetes.io/tls, one in each namespace
DIRECTORY: Final = "/etc/slipway/internal-tls"  # where a pod that serves TLS finds its certificate
CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
ENV_DIRECTORY: Final = "SLIPWAY_TLS_DIRECTORY"  # of slipway-agent
ENV_NAME: Final = "SLIPWAY_TLS_NAME"  # of slipway-agent: the name in the certificate of the engine beside it
CA_FILE: Final = "ca.crt"  # all authorities that are trusted now, in the Secrets and in the ConfigMap of the bundle


def replicas_name(namespace: str) -> str:
    """The name that the certificate of the replicas of this namespace is for; callers verify it."""
    return f"replicas.{namespace}.slipway.internal"


def gateways_name(namespace: str) -> str:
    """The name that the certificate of the gateways' admin ports is for; namespace: that of the release."""
    return f"gateways.{namespace}.slipway.internal"


def authority_name(installation: str) -> str:
    """The Secret with the keys of the certificate authority, and the ConfigMap with the trusted certificates.

    Both are in the namespace of the release; `installation` is the value `name` of the chart.
    """
    return f"{installation}-internal-ca"


def gateways_secret(installation: str) -> str:
    """The Secret, in the namespace of the release, with the certificate of the gateways' admin ports."""
    return f"{installation}-gateway-internal-tls"
