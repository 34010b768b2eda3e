"""Generates the reference page of a kind from its CustomResourceDefinition: fields, types, defaults and meanings."""

from collections.abc import Iterator
from typing import Any, Final

from slipway_api.conditions import PENDING

Schema = dict[str, Any]
_HEAD: Final = ("| field | type | default | meaning |", "|---|---|---|---|")
_PENDING: Final = (
    f"The API server gives a new object a Ready condition of its own: {PENDING['status']}, {PENDING['reason']}, "
    f'"{PENDING["message"]}". It stays until the operator has seen the object.'
)


def reference_page(crd: Schema) -> str:
    """A Markdown page: a table of the fields of spec and of status, and a section for each of them that has fields."""
    names = crd["spec"]["names"]
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    api_version = f"{crd['spec']['group']}/{version['name']}"
    lines = [
        f"# {names['kind']} (`{api_version}`)",
        "",
        schema["description"],
        "",
        f"`kubectl get {names['shortNames'][0]}`; where another API group has the same names, "
        f"`kubectl get {crd['metadata']['name']}`. In a terminal: `kubectl explain {names['shortNames'][0]}.spec`.",
        "",
    ]
    for part in ("spec", "status"):
        if part not in schema["properties"]:
            continue
        lines += [f"## {part}", "", *_tables(part, schema["properties"][part])]
    if "status" in schema["properties"]:
        lines += [_PENDING, ""]
    lines += ["## Rules that the API server checks", ""]
    lines += [f"- `{path}`: {message}" for path, message in _rules("spec", schema["properties"]["spec"])]
    return "\n".join([*lines, ""])


def _tables(part: str, schema: Schema) -> Iterator[str]:
    """The fields of the part itself, each with a link to its section; then the sections."""
    sections: dict[str, list[str]] = {}
    yield from _HEAD
    for path, field, is_required in _fields(part, schema):
        top = ".".join(path.removesuffix("[]").split(".")[:2]).removesuffix("[]")
        if path == top:
            has_section = any(_fields(path, field.get("items", field)))
            yield _row(path, field, is_required, link=f"#{path.replace('.', '').lower()}" if has_section else "")
        else:
            sections.setdefault(top, []).append(_row(path, field, is_required))
    yield ""
    for top, rows in sections.items():
        yield from (f"### {top}", "", *_HEAD, *rows, "")


def _fields(path: str, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Every field below, in the order of the kind; what is declared only to be refused is left out."""
    required = schema.get("required", ())
    for name, child in schema.get("properties", {}).items():
        if child.get("description") == "Refused.":
            continue
        here = f"{path}.{name}"
        yield here, child, name in required
        if child.get("type") == "array":
            yield from _fields(f"{here}[]", child["items"])
        else:
            yield from _fields(here, child)


def _rules(path: str, schema: Schema) -> Iterator[tuple[str, str]]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path + rule.get("fieldPath", ""), rule["message"]
    for name, child in schema.get("properties", {}).items():
        if child.get("type") == "array":
            yield from _rules(f"{path}.{name}[]", child["items"])
        else:
            yield from _rules(f"{path}.{name}", child)


def _row(path: str, schema: Schema, is_required: bool, link: str = "") -> str:
    default = "required" if is_required else _literal(schema.get("default"))
    meaning = schema.get("description", "").replace("|", "\\|").replace("\n", " ")
    name = f"[`{path}`]({link})" if link else f"`{path}`"
    return f"| {name} | {_type(schema)} | {default} | {meaning} |"


def _literal(value: Any) -> str:
    if value is None or isinstance(value, dict):
        return ""
    if isinstance(value, list):
        return "; ".join(", ".join(f"{key} {inner}" for key, inner in entry.items()) for entry in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " \\| ".join(str(value) for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    bounds = [f"{schema[bound]}" if bound in schema else "" for bound in ("minimum", "maximum")]
    return f"{schema.get('type', '')} {'…'.join(bounds) if any(bounds) else ''}".strip()
