"""The parts of a pod that give it access to its model: address, volume and credentials.

A `pvc://` model is a directory of a mounted claim: to the runtime it is a `file://` address. Of the credentials' Secret
the key that the address needs is required, the others are optional: without the Secret, or with the key under another
name, the kubelet does not start the container and says what is missing; a runtime without the key would only learn that
the model does not exist.
"""

from typing import Any, Final
from urllib.parse import urlsplit

from slipway_api import names
from slipway_api.model_spec import Model

CLAIM_VOLUME: Final = "slipway-pvc"


def address(model: Model) -> str:
    """The address on the runtime's command line: `pvc://models/llama` is `file:///mnt/slipway/pvc/llama` to it."""
    if (name := claim(model)) is None:
        return model.uri
    return f"file://{names.PVC_DIRECTORY}{model.uri.removeprefix(f'pvc://{name}')}"


def volumes(model: Model) -> list[dict[str, Any]]:
    """The claim of a `pvc://` model."""
    if (name := claim(model)) is None:
        return []
    return [{"name": CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": name, "readOnly": True}}]


def mounts(model: Model) -> list[dict[str, Any]]:
    """The mount of that claim."""
    if claim(model) is None:
        return []
    return [{"name": CLAIM_VOLUME, "mountPath": names.PVC_DIRECTORY, "readOnly": True}]


def credentials(model: Model) -> list[dict[str, Any]]:
    """Environment variables from the credentials' Secret."""
    if model.credentials_secret_ref is None:
        return []
    required = required_keys(model)
    secret = model.credentials_secret_ref.name
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": key not in required}}}
        for key in names.CREDENTIALS
    ]


def required_keys(model: Model) -> tuple[str, ...]:
    """The keys without which the addresses cannot be opened."""
    schemes = {urlsplit(uri).scheme for uri in (model.uri, model.tokenizer.uri)}
    return tuple(sorted({key for scheme in schemes for key in names.CREDENTIALS_OF_SCHEME.get(scheme, ())}))


def claim(model: Model) -> str | None:
    """The claim of a `pvc://` address."""
    parts = urlsplit(model.uri)
    return parts.netloc if parts.scheme == "pvc" else None
