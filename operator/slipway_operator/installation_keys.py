"""Creates the Secrets with the keys of an installation if they do not exist: `slipway-operator create-keys NAME…`.

They are not part of the chart's manifests, so that no rollback, no `helm template` and no GitOps sync can replace a key
that running replicas already have. A Secret that exists is never changed, nor read: the only right needed is `create`.
"""

import base64
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from slipway_api import names
from slipway_kube.client import Client
from slipway_kube.errors import AlreadyExists, KubeError
from slipway_kube.resources import SECRETS

log = structlog.get_logger()

KEY_BYTES: Final = 36
TRIES: Final = 15
RETRY_AFTER: Final = 1.0


async def create_missing_keys(
    client: Client, namespace: str, secret_names: Sequence[str], *, sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Create each Secret that does not exist, with a random `current`.

    In the first seconds of an installation the pod's network and its rights may be missing: a failed call is repeated.
    Raises the KubeError of the last call.
    """
    for name in secret_names:
        for retries_left in reversed(range(TRIES)):
            try:
                await client.create(SECRETS.path(namespace), _new_secret(namespace, name))
            except AlreadyExists:
                log.info("the key exists and is kept", secret=name)
                break
            except KubeError as exc:
                if not retries_left:
                    raise
                log.warning("the key could not be created yet", secret=name, error=str(exc))
                await sleep(RETRY_AFTER)
            else:
                log.info("created a key", secret=name)
                break


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
