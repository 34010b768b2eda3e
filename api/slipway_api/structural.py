"""Converts pydantic's JSON schema to the structural schema that a CustomResourceDefinition needs.

References are inlined, `X | None` becomes an optional X, titles go, `const` becomes `enum`, integers say int64. A
struct that may be left out defaults to the defaults inside it, because the API server fills in a nested default only
where its parent exists; `{}` would not do, because CEL rules judge the default of a struct before it is filled in.
Empty defaults (`""`, `[]`, `{}` of a map) are not written: absent means the same, and stays absent in the object.
"""

import re
from typing import Any, Final

Schema = dict[str, Any]

_DROPPED = ("title", "$defs", "additionalProperties")
_UNSUPPORTED = ("anyOf", "oneOf", "allOf", "exclusiveMinimum", "exclusiveMaximum", "prefixItems", "patternProperties")
_LINE_BREAK: Final = re.compile(r"(?<!\n)\n(?!\n)")  # of a docstring's lines; an empty line begins a paragraph
_ORDER = ("description", "type", "format", "default", "enum", "required", "properties", "items")


def structural(schema: Schema, definitions: Schema | None = None) -> Schema:
    """The schema as Kubernetes takes it; raises ValueError for what a structural schema cannot express."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    schema = _inlined(_without_null(schema), definitions)
    unsupported = [key for key in _UNSUPPORTED if key in schema]
    if unsupported:
        raise ValueError(f"a structural schema cannot express {', '.join(unsupported)}: {schema}")
    result = {key: value for key, value in schema.items() if key not in _DROPPED}
    if "description" in result:
        result["description"] = _LINE_BREAK.sub(" ", result["description"])
    if "const" in result:
        result["enum"] = [result.pop("const")]
    if result.get("type") == "integer":
        result.setdefault("format", "int64")
    values = schema.get("additionalProperties")
    if "properties" in result:
        result["properties"] = {
            name: _property(child, definitions, required=name in result.get("required", ()))
            for name, child in result["properties"].items()
        }
    elif isinstance(values, dict):
        result["additionalProperties"] = structural(values, definitions)
    elif values is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in result:
        result["items"] = structural(result["items"], definitions)
    return {key: result[key] for key in sorted(result, key=_place)}


def without_defaults(schema: Schema) -> Schema:
    """The schema without any default: the API server must not add to a status what its writer left out."""
    result = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in result:
        result["properties"] = {name: without_defaults(child) for name, child in result["properties"].items()}
    if "items" in result:
        result["items"] = without_defaults(result["items"])
    return result


def _property(schema: Schema, definitions: Schema, *, required: bool) -> Schema:
    """One field of a struct, with the default that the API server should fill in."""
    result = structural(schema, definitions)
    default = result.pop("default", None)
    if required or _may_be_null(schema):
        return result
    if "properties" in result:
        default = {name: child["default"] for name, child in result["properties"].items() if "default" in child} or None
    elif default in ("", [], {}):
        default = None
    if default is not None:
        result["default"] = _without_absent(default)
    return {key: result[key] for key in sorted(result, key=_place)}


def _without_absent(default: Any) -> Any:
    """The default without fields that have no value: absent, never null."""
    if isinstance(default, dict):
        return {name: _without_absent(value) for name, value in default.items() if value is not None}
    if isinstance(default, list):
        return [_without_absent(value) for value in default]
    return default


def _inlined(schema: Schema, definitions: Schema) -> Schema:
    """The schema with its reference replaced; keys beside the reference override it."""
    if "$ref" not in schema:
        return schema
    target: Schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    return _inlined(target, definitions) | {key: value for key, value in schema.items() if key != "$ref"}


def _may_be_null(schema: Schema) -> bool:
    return {"type": "null"} in schema.get("anyOf", ())


def _without_null(schema: Schema) -> Schema:
    """`X | None` as X: in Kubernetes, a field without a value is absent."""
    if not _may_be_null(schema):
        return schema
    options: list[Schema] = [option for option in schema["anyOf"] if option != {"type": "null"}]
    if len(options) != 1:
        raise ValueError(f"a field is one thing or absent: {schema}")
    return {**options[0]} | {key: value for key, value in schema.items() if key not in ("anyOf", "default")}


def _place(key: str) -> tuple[int, str]:
    """Sort key: description and type first, then default, fields and items, then the rest by name."""
    return (_ORDER.index(key), "") if key in _ORDER else (len(_ORDER), key)
