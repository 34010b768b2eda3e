"""Creates the Secrets with the keys of an installation if they do not exist: `slipway-operator create-keys NAME…`.

They are not part of the chart's manifests, so that no rollback, no `helm template` and no GitOps sync can replace a key
that running replicas already have. A Secret that exists is never changed, nor read: the only right needed is `create`.
"""

import base64
import secrets
from collections.abc import Sequence

import structlog

from slipway_api import names
from slipway_kube.client import Client
from slipway_kube.errors import AlreadyExists
from slipway_kube.resources import SECRETS

log = structlog.get_logger()

KEY_BYTES = 36


async def create_missing_keys(client: Client, namespace: str, secret_names: Sequence[str]) -> None:
    """Create each Secret that does not exist, with a random `current`. Raises KubeError if the API server refuses."""
    for name in secret_names:
        try:
            await client.create(SECRETS.path(namespace), _new_secret(namespace, name))
        except AlreadyExists:
            log.info("the key exists and is kept", secret=name)
        else:
            log.info("created a key", secret=name)


def _new_secret(namespace: str, name: str) -> dict[str, object]:
    key = secrets.token_urlsafe(KEY_BYTES).encode()
    return {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/part-of": "slipway", "app.kubernetes.io/managed-by": names.FIELD_MANAGER},
        },
        "type": "Opaque",
        "data": {"current": base64.b64encode(key).decode()},
    }
