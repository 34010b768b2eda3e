"""The engine of a service: what a revision pins of it, and which fields of the spec it takes. Pure.

| spec.runtime.engine                | what follows                                                         |
|------------------------------------|----------------------------------------------------------------------|
| `slipway`                          | nothing here: no Engine is read                                      |
| an Engine that can be read         | the revision covers it; its fields are checked                       |
| ... that refuses a field           | the spec has a fault, InvalidSpec; replicas stay as they are         |
| ... that ignores a field           | the condition EngineFieldsHonoured says so                           |
| none, but the revision is stored   | the service runs on from the record, and Stalled says EngineNotFound |
| none, and the revision is new      | the spec has a fault, EngineNotFound; replicas stay as they are      |
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from slipway_api.conditions import ConditionStatus, Reason
from slipway_api.engine import Condition, EngineSpec, Policy, entries
from slipway_api.engine_fields import FIELDS, SLIPWAY, field_texts, is_set
from slipway_api.engine_matrix import handled_fields
from slipway_api.inference_service import DirectAccess, InferenceServiceSpec
from slipway_api.types import Struct

NAMES_SHOWN: Final = 8
FIELDS_SHOWN: Final = 3
_NOT_INPUTS: Final = {"description", "fields"}  # they change no pod
UNENFORCED: Final = (
    "routing.directAccess GatewayOnly (the engine asks callers for no token: the NetworkPolicy keeps others away)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedEngine:
    """An engine as a revision has it, from its first pod to its last."""

    name: str
    spec: EngineSpec
    agent_image: str
    """Image of slipway-agent."""

    def to_json(self) -> dict[str, Any]:
        """For the record of the revision."""
        return {"name": self.name, "agentImage": self.agent_image, "spec": self.spec.to_json()}

    @classmethod
    def of_record(cls, raw: Mapping[str, Any]) -> "PinnedEngine":
        """From the record of a revision; raises ValidationError for one that cannot be read."""
        record = _Record.model_validate(raw)
        return cls(name=record.name, spec=record.spec, agent_image=record.agent_image)


class _Record(Struct):
    name: str
    agent_image: str = ""
    spec: EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeen:
    """The Engine that a service names, as the cluster has it now."""

    spec: EngineSpec | None = None
    """None: there is none of that name, or it cannot be read."""
    fault: str = ""
    """Why it cannot be read; empty: it can, or it does not exist."""
    names: tuple[str, ...] = ()
    """The Engines that exist."""


def see_engine(name: str, specs: Mapping[str, Any]) -> EngineSeen | None:
    """The Engine of that name among the specs of all that exist; None for our own runtime, which needs none."""
    if name == SLIPWAY:
        return None
    known = tuple(sorted(specs))
    if name not in specs:
        return EngineSeen(names=known)
    try:
        spec = EngineSpec.model_validate(specs[name])
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        place = ".".join(("spec", *map(str, first["loc"])))
        return EngineSeen(fault=f"{place}: {first['msg'][:200]}; correct the Engine", names=known)
    if spec.dialect is None or not spec.image:
        return EngineSeen(fault="it needs spec.image and spec.dialect; correct the Engine", names=known)
    return EngineSeen(spec=spec, names=known)


def describe_missing(name: str, seen: EngineSeen | None) -> str:
    """`there is no Engine vlm (there are slipway, vllm): …`, or why the one that is there cannot be used."""
    if seen is not None and seen.fault:
        return f"Engine {name} cannot be followed: {seen.fault}"
    known = sorted({SLIPWAY, *(seen.names if seen is not None else ())})
    more = f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
    verb = "is" if len(known) == 1 else "are"
    return (
        f"there is no Engine {name} (there {verb} {', '.join(known[:NAMES_SHOWN])}{more}): "
        "correct spec.runtime.engine, or create the Engine"
    )


def engine_inputs(engine: PinnedEngine, spec: InferenceServiceSpec) -> str:
    """The part of a revision's hash that the engine gives: canonical JSON, without defaults and what changes no pod."""
    without = _NOT_INPUTS | ({"image"} if spec.runtime.image else set())
    written = engine.spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude_none=True, exclude=without
    )
    text = json.dumps({"name": engine.name, "spec": written}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"engine {text}"


def fill_resources(spec: InferenceServiceSpec, engine: PinnedEngine | None) -> InferenceServiceSpec:
    """The spec with the engine's CPU and memory where the service names none."""
    if engine is None:
        return spec
    defaults, resources = engine.spec.resources, spec.resources
    overlay = next((one.resources for one in spec.template.spec.containers), None)
    named = {*resources.requests, *resources.limits}
    named |= {*overlay.requests, *overlay.limits} if overlay is not None else set()
    filled = {
        "requests": {key: value for key, value in defaults.requests.items() if key not in named} | resources.requests,
        "limits": {key: value for key, value in defaults.limits.items() if key not in named} | resources.limits,
    }
    return spec.model_copy(update={"resources": resources.model_copy(update=filled)})


def find_lacking(spec: InferenceServiceSpec, engine: PinnedEngine) -> str:
    """Why the engine cannot run this spec, in one sentence; empty: it can. `spec`: with what its profile fills in."""
    scheme = urlsplit(spec.model.uri).scheme
    sources = [source.value for source in engine.spec.sources]
    if scheme not in sources:
        return f"engine {engine.name} loads no {scheme}:// model (it loads {', '.join(sources)}): change spec.model.uri"
    texts = field_texts(spec)
    for entry, _ in entries(engine.spec):
        name = entry.field or ""
        if name and entry.values and _applies(entry, spec) and texts[name] not in entry.values:
            known = ", ".join(sorted(entry.values))
            return (
                f"engine {engine.name} has no {name} {texts[name]} (it has {known}): change spec.{name}, or choose "
                "another spec.runtime.engine"
            )
    refused = [
        f"spec.{name} ({why})" if why else f"spec.{name}"
        for name, policy, why in _unhandled(spec, engine)
        if policy is Policy.REFUSE
    ]
    if not refused:
        return ""
    more = f" and {len(refused) - FIELDS_SHOWN} more" if len(refused) > FIELDS_SHOWN else ""
    return (
        f"engine {engine.name} has no flag for {', '.join(refused[:FIELDS_SHOWN])}{more}: remove the field, or choose "
        "another spec.runtime.engine"
    )


def fields_condition(
    spec: InferenceServiceSpec, engine: PinnedEngine | None
) -> tuple[ConditionStatus, Reason, str] | None:
    """Condition EngineFieldsHonoured; None: nothing is ignored, or the engine is our own runtime."""
    if engine is None:
        return None
    ignored = [f"{name} ({why})" for name, policy, why in _unhandled(spec, engine) if policy is Policy.IGNORE]
    if spec.routing.direct_access is DirectAccess.GATEWAY_ONLY:
        ignored.append(UNENFORCED)
    if not ignored:
        return None
    return ConditionStatus.FALSE, Reason.ENGINE_IGNORES, f"engine {engine.name} ignores {'; '.join(ignored)}"


def _unhandled(spec: InferenceServiceSpec, engine: PinnedEngine) -> list[tuple[str, Policy, str]]:
    """The fields that the spec sets and no template takes: name, what becomes of it, and why."""
    handled = handled_fields(engine.spec)
    policies = {one.name: one for one in engine.spec.fields}
    found = []
    for name in FIELDS:
        if name in handled or not is_set(spec, name):
            continue
        policy = policies.get(name)
        found.append((name, policy.policy, policy.why) if policy is not None else (name, Policy.REFUSE, ""))
    return found


def _applies(entry: Condition, spec: InferenceServiceSpec) -> bool:
    """Whether an entry is written, as far as its condition says."""
    return entry.field is None or is_set(spec, entry.field)
