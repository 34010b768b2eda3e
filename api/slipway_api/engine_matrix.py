"""The table of fields × engines: what each Engine that the chart ships makes of each field of an InferenceService."""

from collections.abc import Mapping

from slipway_api.engine import EngineSpec, Policy, entries, names_in
from slipway_api.engine_fields import FIELDS, field_of

_WORDS = {Policy.REFUSE: "refused", Policy.IGNORE: "ignored"}


def handled_fields(spec: EngineSpec) -> frozenset[str]:
    """The fields that a template of the engine takes."""
    texts = [*spec.command, *(text for _, of_entry in entries(spec) for text in of_entry)]
    named = {field_of(name) for text in texts for name in names_in(text)}
    named |= {entry.field for entry, _ in entries(spec)}
    return frozenset(name for name in named if name is not None)


def matrix_section(engines: Mapping[str, EngineSpec]) -> str:
    """The part of the reference page with the table."""
    lines = [
        "## Fields and the Engines of the chart",
        "",
        "| field below `spec` | " + " | ".join(f"`{name}`" for name in engines) + " |",
        "|---|" + "---|" * len(engines),
        *(f"| `{field}` | " + " | ".join(_cell(field, spec) for spec in engines.values()) + " |" for field in FIELDS),
        "| `internalTLS` of the chart | " + " | ".join(_tls_cell(spec) for spec in engines.values()) + " |",
        "",
    ]
    return "\n".join(lines)


def _tls_cell(spec: EngineSpec) -> str:
    return "yes" if spec.tls is not None else "refused: EngineWithoutTLS"


def _cell(field: str, spec: EngineSpec) -> str:
    if field not in handled_fields(spec):
        policy = next((one for one in spec.fields if one.name == field), None)
        return "refused" if policy is None else f"{_WORDS[policy.policy]}: {policy.why}"
    values = [entry.values for entry, _ in entries(spec) if entry.field == field and entry.values]
    known = ", ".join(f"`{value}`" for value in values[0]) if values else ""
    return f"yes: the default, {known}" if known else "yes"
