"""The ServiceTemplate kind: blocks of a service's spec that a platform team owns and services inherit by name.

A block is a field directly below `spec`. The service's own block wins, then that of the last template in
`spec.baseRefs`; blocks are never mixed. So each block is checked by the definition of the object that has it, and lists
need no rule for merging. A block that a service does not write is absent from the stored object, because the definition
of InferenceService gives these blocks no default (docs/adr/0133).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from pydantic import Field

from slipway_api.autoscaling import Autoscaling
from slipway_api.inference_service import Availability, Budget, Drain, InferenceServiceSpec, Resources
from slipway_api.names import API_VERSION
from slipway_api.overlay import Template
from slipway_api.rollout_spec import Rollout
from slipway_api.slo import SLO
from slipway_api.types import ObjectMeta, Rule, Struct, cel_rules


class ServiceTemplateSpec(Struct):
    """Blocks that services inherit: each is the field of the same name below spec of an InferenceService."""

    description: str = Field(default="", max_length=256)
    """The purpose of the template."""
    resources: Resources | None = None
    """Resources that one replica requests on its node."""
    template: Template | None = None
    """An overlay for the pods, within an allow-list."""
    autoscaling: Autoscaling | None = None
    """The autoscaler's limits, metrics and behavior."""
    rollout: Rollout | None = None
    """How a new revision replaces the old one. `paused: true` holds the rollouts of all services that inherit it."""
    drain: Drain | None = None
    """How a replica is drained: it gets no new requests, finishes those that it has, and only then stops."""
    availability: Availability | None = None
    """How replicas are protected from disruptions, and how failed ones are replaced."""
    budget: Budget | None = None
    """What each service may cost."""
    slo: SLO | None = None
    """Service level objectives of each service."""


BLOCKS: Final = tuple(name for name in ServiceTemplateSpec.model_fields if name != "description")
"""The fields of a service's spec that a template may supply; the same name in YAML and in Python."""

Blocks = Mapping[str, Any]
"""Some of `BLOCKS`, as structs or as JSON."""


class ServiceTemplate(Struct):
    """Defaults that a platform team owns and services inherit by spec.baseRefs. It belongs to the cluster; a change
    rolls out in each service that inherits the changed block, by the strategy of that service."""

    model_config = cel_rules(
        Rule(
            "self.metadata.name.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$') && size(self.metadata.name) <= 63",
            "metadata.name must be at most 63 lower-case letters, digits and '-': services name it in spec.baseRefs",
            ".metadata.name",
        )
    )

    KIND: ClassVar[str] = "ServiceTemplate"
    PLURAL: ClassVar[str] = "servicetemplates"

    api_version: str = API_VERSION
    kind: str = "ServiceTemplate"
    metadata: ObjectMeta
    spec: ServiceTemplateSpec
    """Blocks that services inherit."""


def blocks_of(spec: ServiceTemplateSpec) -> dict[str, Struct]:
    """The blocks that a template has."""
    return {name: block for name in BLOCKS if (block := getattr(spec, name)) is not None}


def own_blocks(spec: InferenceServiceSpec) -> frozenset[str]:
    """The blocks that a service writes itself; of the spec as the API server has it, never of a merged one."""
    return frozenset(name for name in BLOCKS if name in spec.model_fields_set and getattr(spec, name) is not None)


def stack(layers: Sequence[Blocks]) -> dict[str, Any]:
    """The blocks of all layers; of two with the same block the later one wins, whole."""
    return {name: block for layer in layers for name, block in layer.items()}


def merge(spec: InferenceServiceSpec, inherited: Blocks) -> InferenceServiceSpec:
    """The spec with the inherited blocks that it does not write itself."""
    own = own_blocks(spec)
    added = {name: block for name, block in inherited.items() if name in BLOCKS and name not in own}
    return spec.model_copy(update=added) if added else spec


def with_inherited(body: Mapping[str, Any]) -> dict[str, Any]:
    """A stored InferenceService as JSON, with the inherited blocks that the operator recorded in its status.

    For every reader but the operator's own plan: the record changes only after the operator has checked a merged spec,
    and it stays while a template is missing.
    """
    spec, status = body.get("spec"), body.get("status")
    inherited = status.get("inherited") if isinstance(status, Mapping) else None
    if not isinstance(spec, Mapping) or not spec.get("baseRefs") or not isinstance(inherited, Mapping):
        return dict(body)
    added = {name: block for name, block in inherited.items() if name in BLOCKS and spec.get(name) is None}
    return {**body, "spec": {**spec, **added}}
