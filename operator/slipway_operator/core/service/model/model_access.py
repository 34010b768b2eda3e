"""The parts of a pod that give it access to its model: address, volumes, network and credentials.

| address        | volume                     | what the runtime gets as address        |
|----------------|----------------------------|-----------------------------------------|
| `pvc://c/path` | the claim c, read-only     | `file://` and the path in it            |
| `oci://image`  | the image, read-only       | `file://` and the directory after the # |
| any other      | none; that of the cache    | the address                             |

Of the credentials' Secret the key that the address needs is required, the others are optional: without the Secret, or
with the key under another name, the kubelet does not start the container and says what is missing; a runtime without
the key would only learn that the model does not exist.
"""

from typing import Any, Final
from urllib.parse import urlsplit

from slipway_api import names
from slipway_api.model_source import CachePolicy
from slipway_api.model_spec import Model
from slipway_api.runtime_spec import Runtime
from slipway_operator.core.installation import NodeCache

CLAIM_VOLUME: Final = "slipway-pvc"
IMAGE_VOLUME: Final = "slipway-image"
CACHE_VOLUME: Final = "slipway-models"
CA_VOLUME: Final = "slipway-ca"


def address(model: Model) -> str:
    """The address on the runtime's command line: `pvc://models/llama` is `file:///mnt/slipway/pvc/llama` to it."""
    if (name := claim(model)) is not None:
        return f"file://{names.PVC_DIRECTORY}{model.uri.removeprefix(f'pvc://{name}')}"
    if image(model) is not None:
        _, _, folder = model.uri.partition("#")
        return f"file://{names.IMAGE_DIRECTORY}" + (f"/{folder}" if folder else "")
    return model.uri


def volumes(model: Model, node_cache: NodeCache | None = None) -> list[dict[str, Any]]:
    """The volumes: claim or image of the model, cache, and certificates. `node_cache`: the folder that nodes have."""
    found: list[dict[str, Any]] = []
    if (name := claim(model)) is not None:
        found.append({"name": CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
    if (reference := image(model)) is not None:
        found.append({"name": IMAGE_VOLUME, "image": {"reference": reference, "pullPolicy": "IfNotPresent"}})
    if model.cache.policy is CachePolicy.SHARED:
        found.append({"name": CACHE_VOLUME, "persistentVolumeClaim": {"claimName": model.cache.claim_name}})
    elif model.cache.policy is CachePolicy.NODE and node_cache is not None:
        found.append({"name": CACHE_VOLUME, "hostPath": {"path": node_cache.path, "type": "Directory"}})
    if (bundle := model.network.ca_bundle_ref) is not None:
        certificates = [{"key": bundle.key, "path": bundle.key}]
        found.append({"name": CA_VOLUME, "configMap": {"name": bundle.name, "items": certificates}})
    return found


def mounts(model: Model, node_cache: NodeCache | None = None, *, namespace: str = "") -> list[dict[str, Any]]:
    """The mounts of those volumes. Of a node's folder a pod sees only the part of its own namespace."""
    paths = {CLAIM_VOLUME: names.PVC_DIRECTORY, IMAGE_VOLUME: names.IMAGE_DIRECTORY, CA_VOLUME: names.CA_DIRECTORY}
    found: list[dict[str, Any]] = []
    for volume in volumes(model, node_cache):
        name = volume["name"]
        if name != CACHE_VOLUME:
            found.append({"name": name, "mountPath": paths[name], "readOnly": True})
            continue
        mount = {"name": name, "mountPath": names.MODEL_CACHE_DIRECTORY}
        # What a pod writes there, others load: a namespace must not be able to give its weights to another one.
        found.append(mount | {"subPath": namespace} if "hostPath" in volume else mount)
    return found


def environment(model: Model, node_cache: NodeCache | None = None) -> list[dict[str, Any]]:
    """Environment variables of the cache and of the network, under the names that every tool reads."""
    network = model.network
    values: dict[str, str] = {}
    if has_cache(model, node_cache):
        values["SLIPWAY_CACHE_DIR"] = names.MODEL_CACHE_DIRECTORY
        if model.cache.policy is CachePolicy.NODE and node_cache is not None and node_cache.limit:
            values["SLIPWAY_CACHE_LIMIT"] = node_cache.limit
    values |= {"HF_ENDPOINT": network.hub_endpoint} if network.hub_endpoint else {}
    if network.proxy:
        values |= {"HTTPS_PROXY": network.proxy, "HTTP_PROXY": network.proxy}
        values |= {"NO_PROXY": network.no_proxy} if network.no_proxy else {}
    if (bundle := network.ca_bundle_ref) is not None:
        path = f"{names.CA_DIRECTORY}/{bundle.key}"
        values |= {"SSL_CERT_FILE": path, "AWS_CA_BUNDLE": path}  # the second one is what S3's library reads
    return [{"name": name, "value": value} for name, value in values.items()]


def has_cache(model: Model, node_cache: NodeCache | None) -> bool:
    """Whether pods of this model have a cache that they share with others."""
    return any(volume["name"] == CACHE_VOLUME for volume in volumes(model, node_cache))


def draft_model_uri(runtime: Runtime) -> str:
    """The address of the draft model; empty: there is none."""
    draft = runtime.speculation.draft_model
    return "" if draft is None else draft.uri


def credentials(model: Model, runtime: Runtime) -> list[dict[str, Any]]:
    """Environment variables from the credentials' Secret."""
    if model.credentials_secret_ref is None:
        return []
    required = required_keys(model, runtime)
    secret = model.credentials_secret_ref.name
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": key not in required}}}
        for key in names.CREDENTIALS
    ]


def required_keys(model: Model, runtime: Runtime) -> tuple[str, ...]:
    """The keys without which the addresses cannot be opened."""
    schemes = {urlsplit(uri).scheme for uri in (model.uri, model.tokenizer.uri, draft_model_uri(runtime))}
    return tuple(sorted({key for scheme in schemes for key in names.CREDENTIALS_OF_SCHEME.get(scheme, ())}))


def immutable_parts(model: Model) -> list[dict[str, Any]]:
    """What these fields put into a pod and no claim of a warm pod can add, beside credentials and volumes."""
    node = [{"cache": model.cache.policy.value}] if model.cache.policy is CachePolicy.NODE else []
    return [*environment(model), *node]


def claim(model: Model) -> str | None:
    """The claim of a `pvc://` address."""
    parts = urlsplit(model.uri)
    return parts.netloc if parts.scheme == "pvc" else None


def image(model: Model) -> str | None:
    """The reference of an `oci://` address."""
    if not model.uri.startswith("oci://"):
        return None
    return model.uri.removeprefix("oci://").partition("#")[0]
