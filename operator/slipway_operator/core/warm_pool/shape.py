"""The parts of a pod that no claim can change, as digests: a service may claim only pods that agree in all of them.

Image, resources, environment, mounts, Secrets and placement of a live pod are immutable. They are compared as the user
wrote them, not as pods are built from them: so a newer operator that builds pods otherwise agrees with older pods.

A pod that has loaded a model has one part more, the model with all parameters that a claim cannot change. Without this
part a pod fits services of any model.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from slipway_api.inference_service import InferenceService, Resources
from slipway_api.overlay import ContainerOverlay, PodOverlay, Template
from slipway_api.runtime_api import CLAIMED_FIELDS
from slipway_api.warm_pool import WarmLevel, WarmPool
from slipway_operator.core.service.model import model_access
from slipway_operator.core.service.replicas.pod import model_spec
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.warm_pool.stand_in import stand_in_service

PARTS: Final = ("image", "resources", "environment", "volumes", "placement", "security", "arguments", "secrets")
MODEL: Final = "model"
LEVEL: Final = "level"
_SECURITY: Final = {"security_context", "service_account_name", "runtime_class_name"}
_DIGITS: Final = 8
# A field that a newer version adds has its default in older pods, and is left out: they agree.
_FIXED: Final[dict[str, Any]] = {"exclude_defaults": True, "exclude": set(CLAIMED_FIELDS)}

Shape = Mapping[str, str]


def shape_of_service(service: InferenceService, revision: Revision) -> Shape:
    """The shape of the pods of this revision; `service` has the inputs of the revision."""
    spec = service.spec
    shape = _shape(
        spec.resources,
        spec.template,
        image=revision.image,
        env=spec.runtime.env,
        arguments=spec.runtime.args,
        secrets=[*model_access.credentials(spec.model, spec.runtime), *model_access.immutable_parts(spec.model)],
        claims=model_access.volumes(spec.model),
        priority_class=spec.availability.priority_class_name,
    )
    return shape | {MODEL: _digest(model_spec(service, revision).model_dump(mode="json", **_FIXED))}


def shape_of_pool(pool: WarmPool, default_image: str) -> Shape:
    """The shape of the pods that the pool starts now."""
    shape = shape_of_service(stand_in_service(pool), Revision("", pool.spec.image or default_image))
    level = pool.spec.level
    return {**shape, MODEL: "" if level is WarmLevel.BOOTED else shape[MODEL], LEVEL: level.value}


def write_shape(shape: Shape) -> str:
    """`image=1f0c2a9d,resources=…`: the annotation of a pod of a pool; `model` and `level` where it has a model."""
    loaded = (MODEL, LEVEL) if shape.get(LEVEL, WarmLevel.BOOTED) != WarmLevel.BOOTED else ()
    return ",".join(f"{part}={shape[part]}" for part in (*PARTS, *loaded))


def differing_parts(annotation: str, wanted: Shape) -> tuple[str, ...]:
    """The parts in which a pod with this annotation differs from what a service, or its pool, wants."""
    has = _parts(annotation)
    differing = [part for part in PARTS if has.get(part) != wanted[part]]
    if LEVEL in wanted:  # the pool's own pods are exactly as it asks
        standard = {MODEL: "", LEVEL: WarmLevel.BOOTED.value}
        differing += [part for part, absent in standard.items() if has.get(part, absent) != wanted[part]]
    elif MODEL in has and has[MODEL] != wanted[MODEL]:
        differing.append(MODEL)
    return tuple(differing)


def has_model(annotation: str) -> bool:
    """Whether a pod with this annotation has loaded a model."""
    return MODEL in _parts(annotation)


def _parts(annotation: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in annotation.split(",") if "=" in part)


def _shape(
    resources: Resources,
    template: Template,
    *,
    image: str,
    env: Any = (),
    arguments: Any = (),
    secrets: Any = (),
    claims: Any = (),
    priority_class: str = "",
) -> dict[str, str]:
    overlay = template.spec
    container = next(iter(overlay.containers), ContainerOverlay(name="server"))
    placement = _written(overlay, without={"containers", "volumes", *_SECURITY})
    if priority_class:  # a live pod keeps its priority; the template's own wins
        placement = {"priority_class_name": priority_class} | placement
    merged = {entry["name"]: entry for entry in (*env, *container.env)}
    return {
        "image": _digest(image),
        "resources": _digest([resources.to_json(), container.resources.to_json()]),
        "environment": _digest(sorted(merged.items())),
        "volumes": _digest([list(overlay.volumes), list(container.volume_mounts), list(claims)]),
        "placement": _digest(placement),
        "security": _digest(_written(overlay, only=_SECURITY)),
        "arguments": _digest(list(arguments)),
        "secrets": _digest(list(secrets)),
    }


def _written(overlay: PodOverlay, *, only: set[str] | None = None, without: set[str] | None = None) -> Any:
    return overlay.model_dump(mode="json", exclude_defaults=True, exclude_none=True, include=only, exclude=without)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:_DIGITS]
