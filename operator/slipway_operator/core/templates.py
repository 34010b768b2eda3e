"""The blocks that a service inherits from ServiceTemplates: the merged spec, its origin, and its faults. Pure.

| spec.baseRefs                                  | the service is planned with                                  |
|------------------------------------------------|--------------------------------------------------------------|
| empty                                          | its own spec                                                 |
| all can be read, and the merged spec is valid  | its own blocks, then those of the templates, the last first  |
| otherwise, and status has what it inherited    | its own blocks, then those; nothing new is rolled out        |
| otherwise                                      | nothing: replicas stay as they are                           |

A fault is Stalled with TemplateNotFound, or InvalidSpec if the merged spec breaks a rule. What was inherited is
recorded in status, so a deleted or broken template stops no service, and a new leader continues with the same values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from slipway_api.conditions import EventReason, Reason
from slipway_api.inference_service import InferenceService, InferenceServiceSpec
from slipway_api.inference_status import InferenceServiceStatus, TemplateStatus
from slipway_api.service_template import ServiceTemplateSpec, blocks_of, merge, own_blocks, stack
from slipway_api.spec_rules import find_broken_rules
from slipway_operator.core.actions import Event

NAMES_SHOWN: Final = 8


class StoredTemplate(NamedTuple):
    """A ServiceTemplate as the cluster has it."""

    spec: Any
    """As JSON."""
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatesSeen:
    """The ServiceTemplates of the cluster."""

    by_name: Mapping[str, StoredTemplate] = field(default_factory=dict)
    refused: str = ""
    """Why they cannot be listed; empty: they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a service inherits."""

    templates: tuple[TemplateStatus, ...] = ()
    """For status.templates."""
    blocks: Mapping[str, Any] | None = None
    """For status.inherited: the inherited blocks as JSON; None: spec.baseRefs is empty, or nothing was applied yet."""
    fault: str = ""
    """Why the templates cannot be applied as they are now; empty: they are applied."""
    reason: Reason = Reason.TEMPLATE_NOT_FOUND
    """The reason of conditions for the fault."""
    is_recorded: bool = False
    """Whether the blocks come from status, because there is a fault."""


NOTHING: Final = Inheritance()


def inherit(service: InferenceService, seen: TemplatesSeen) -> tuple[InferenceService, Inheritance]:
    """The service with its merged spec, and what of it is inherited. `service`: as the API server has it."""
    spec, status = service.spec, service.status
    if not spec.base_refs:
        return service, NOTHING
    merged, applied = _apply(spec, seen)
    if not applied.fault:
        return _with_spec(service, merged), applied
    recorded = _recorded(status)
    if recorded is None:
        return service, applied
    return _with_spec(service, merge(spec, blocks_of(recorded))), Inheritance(
        templates=status.templates,
        blocks=status.inherited,
        fault=applied.fault,
        reason=applied.reason,
        is_recorded=True,
    )


def describe_sources(templates: Iterable[TemplateStatus]) -> str:
    """`drain and slo from ServiceTemplate gold (generation 3)`; those that supply nothing are left out."""
    return "; ".join(
        f"{', '.join(one.blocks)} from ServiceTemplate {one.name} (generation {one.generation})"
        for one in templates
        if one.blocks
    )


def template_events(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Event]:
    """An event when the inherited blocks change."""
    if not after.templates or before.inherited == after.inherited:
        return []
    sources = describe_sources(after.templates) or "nothing: the service has every block of its templates itself"
    return [Event(reason=EventReason.TEMPLATE_APPLIED, action="Inherit", message=f"inherits {sources}")]


def _apply(spec: InferenceServiceSpec, seen: TemplatesSeen) -> tuple[InferenceServiceSpec, Inheritance]:
    """The spec merged with the templates as they are now; with a fault the spec as it is."""
    layers, generations, origins = [], dict[str, int](), dict[str, str]()
    own = own_blocks(spec)
    for name in (one.name for one in spec.base_refs):
        found = _read(name, seen)
        if isinstance(found, str):
            return spec, Inheritance(fault=found)
        blocks = {block: value for block, value in blocks_of(found).items() if block not in own}
        layers.append(blocks)
        origins |= dict.fromkeys(blocks, name)
        generations[name] = seen.by_name[name].generation
    inherited = stack(layers)
    merged = merge(spec, inherited)
    if fault := _find_conflict(merged, origins):
        return spec, Inheritance(fault=fault, reason=Reason.INVALID_SPEC)
    templates = tuple(
        TemplateStatus(name=name, generation=number, blocks=tuple(one for one in inherited if origins[one] == name))
        for name, number in generations.items()
    )
    return merged, Inheritance(templates=templates, blocks={one: inherited[one].to_json() for one in inherited})


def _read(name: str, seen: TemplatesSeen) -> ServiceTemplateSpec | str:
    """The template of that name, or why it cannot be applied, with the remedy."""
    if name not in seen.by_name and seen.refused:
        return f"the API server does not list ServiceTemplates ({seen.refused}): install the CRD and the RBAC"
    if name not in seen.by_name:
        known = sorted(seen.by_name)
        more = f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
        there = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known[:NAMES_SHOWN]) or 'none'}{more}"
        return f"there is no ServiceTemplate {name} ({there}): correct spec.baseRefs, or create the ServiceTemplate"
    try:
        return ServiceTemplateSpec.model_validate(seen.by_name[name].spec)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        place = ".".join(("spec", *map(str, first["loc"])))
        return f"ServiceTemplate {name} cannot be read: {place}: {first['msg'][:200]}; correct the ServiceTemplate"


def _find_conflict(merged: InferenceServiceSpec, origins: Mapping[str, str]) -> str:
    """The first rule that the merged spec breaks, with the origin of the blocks that it reads; empty: none."""
    for broken in find_broken_rules(merged, origins):
        inherited = [block for block in broken.blocks if block in origins]
        sources = " and ".join(f"spec.{block} is from ServiceTemplate {origins[block]}" for block in inherited)
        return (
            f"{broken.rule.message} ({sources}): correct the ServiceTemplate, or set "
            f"{' or '.join(f'spec.{block}' for block in inherited)} in the service"
        )
    return ""


def _recorded(status: InferenceServiceStatus) -> ServiceTemplateSpec | None:
    """What the service last inherited; None: nothing yet, or the record cannot be read."""
    if not status.templates:
        return None
    try:
        return ServiceTemplateSpec.model_validate(status.inherited or {})
    except ValidationError:
        return None


def _with_spec(service: InferenceService, spec: InferenceServiceSpec) -> InferenceService:
    return service if spec is service.spec else service.model_copy(update={"spec": spec})
