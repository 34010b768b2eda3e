"""Parses a stored InferenceService, also one that breaks the present schema, whose faults become one sentence.

Such an object was stored before the schema had the rule that it breaks. The sentence becomes a condition for its
owner; the fields that can be read still count, so that its replicas drain by their own rules when it is deleted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from slipway_api.inference_service import InferenceService

STAND_IN_MODEL: Final = {"uri": "file:///"}  # never reaches a pod: of a spec with a fault nothing is created


@dataclass(frozen=True, slots=True)
class Reading:
    """One InferenceService as far as it can be read."""

    service: InferenceService
    fault: str = ""
    """What is wrong with the spec; the parts of the service's spec that broke a rule are then not the user's."""


def read(body: Mapping[str, Any]) -> Reading:
    """The typed resource; unknown fields are ignored, so an older operator survives a newer resource.

    Raises ValidationError for what can be no object at all: one without a name.
    """
    try:
        return Reading(InferenceService.model_validate(body))
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False)
    faults = [error for error in errors if error["loc"][0] == "spec"]
    mended = {
        **body,
        "spec": {"model": STAND_IN_MODEL, **_without(body.get("spec"), faults)},
        # The status of an earlier version: fields that cannot be read are written anew.
        "status": _without(body.get("status"), [error for error in errors if error["loc"][0] == "status"]),
    }
    return Reading(InferenceService.model_validate(mended), _sentence(faults) if faults else "")


def _without(part: Any, errors: Iterable[ErrorDetails]) -> dict[str, Any]:
    """The valid fields of a spec or a status."""
    if not isinstance(part, Mapping):
        return {}
    broken = {error["loc"][1] for error in errors if len(error["loc"]) > 1}
    return {name: value for name, value in part.items() if name not in broken}


def _sentence(errors: list[ErrorDetails]) -> str:
    """A sentence with every invalid field, the first with its rule. Of values only numbers: others may be secrets."""
    first, more = errors[0], sorted({_path(error) for error in errors[1:]} - {_path(errors[0])})
    others = f"; also wrong: {', '.join(more)}" if more else ""
    if first["type"] == "missing":
        return f"{_path(first)} is missing{others}"
    rule, value = first["msg"][:1].lower() + first["msg"][1:], first["input"]
    said = f", not {value}" if isinstance(value, int | float) else ""
    return f"{_path(first)} is not valid: {rule}{said}{others}"


def _path(error: ErrorDetails) -> str:
    """`spec.runtime.env[0].name`"""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in error["loc"]).removeprefix(".")
