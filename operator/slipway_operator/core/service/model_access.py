"""How a pod gets at its model: the address its runtime is given, the volume behind it, the keys that open it.

A `pvc://` model is a directory of a mounted claim, so the runtime never hears of claims. Of the credentials' Secret the
key that the address needs is required, the others are optional: without the Secret, or with the key under another name,
the kubelet does not start the container and says what is missing, instead of a runtime that asks without a key and is
told that the model does not exist.
"""

from typing import Any, Final
from urllib.parse import urlsplit

from slipway_api import names
from slipway_api.model_spec import Model

CLAIM_VOLUME: Final = "slipway-pvc"


def address(model: Model) -> str:
    """What the runtime is told: `pvc://models/llama` is `file:///mnt/slipway/pvc/llama` to it."""
    if (name := claim(model)) is None:
        return model.uri
    return f"file://{names.PVC_DIRECTORY}{model.uri.removeprefix(f'pvc://{name}')}"


def volumes(model: Model) -> list[dict[str, Any]]:
    """The claim of a `pvc://` model."""
    if (name := claim(model)) is None:
        return []
    return [{"name": CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": name, "readOnly": True}}]


def mounts(model: Model) -> list[dict[str, Any]]:
    """Where that claim appears."""
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
    """What the addresses cannot be opened without."""
    schemes = {urlsplit(uri).scheme for uri in (model.uri, model.tokenizer.uri)}
    return tuple(sorted({key for scheme in schemes for key in names.CREDENTIALS_OF_SCHEME.get(scheme, ())}))


def claim(model: Model) -> str | None:
    """The claim of a `pvc://` address."""
    parts = urlsplit(model.uri)
    return parts.netloc if parts.scheme == "pvc" else None
