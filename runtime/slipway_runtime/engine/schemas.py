"""Prepares a JSON schema for the compiler: moves its references, and drops what says nothing. Pure.

| a keyword                                                        | is                                          |
|------------------------------------------------------------------|---------------------------------------------|
| is null, empty or the default (`uniqueItems: false`)             | dropped                                     |
| is an annotation: an unknown `format`, `$id`, `$schema`          | dropped                                     |
| can be written another way: `propertyNames` with an enum, `not`  | rewritten                                   |
| is a pattern over a named property                               | narrowed: both hold for the property        |
| cannot be enforced: `uniqueItems: true`, `contains`, look-ahead  | refused if strict, else ignored, by its path |

`oneOf` is enforced as `anyOf`: an answer fits at least one branch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, unquote

# Keywords whose values are schemas, lists of them, and schemas by name.
_SCHEMA: Final = (
    "additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems", "contentSchema",
)  # fmt: skip
_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA: Final = ("const", "default", "enum", "examples", "example", "x-guidance")  # values, not schemas
_FORMATS: Final = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
}  # fmt: skip
# Without effect on what is valid, though the compiler refuses or misreads some of them.
_ANNOTATIONS: Final = {
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$vocabulary",
    "$comment",
}
_CANNOT: Final = (
    "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies", "if", "then",
    "else", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
)  # fmt: skip
_LOOK_AROUND: Final = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")
_DEEPEST: Final = 200  # the compiler itself refuses what is nested deeper than 64
_NEVER: Final[tuple[Any, ...]] = ({}, True)  # `not` of these: nothing is valid


@dataclass
class Prepared:
    """A schema for the compiler, and the paths of what it does not enforce."""

    schema: Any
    unenforced: list[str] = field(default_factory=list)  # JSON pointers


def prepared(schema: Any, *, base: str = "#") -> Prepared:
    """Prepare a schema that will stand at `base` of another one, such as `#/$defs/weather`; `#`: it stays alone."""
    work = _Work(base, dict(_names(schema, "#", 0)))
    return Prepared(work.schema(schema, "#", 0), work.unenforced)


def _names(schema: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """The `$id` and `$anchor` in a schema, and the pointers to their schemas."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    if isinstance(name := schema.get("$id", schema.get("id")), str):
        yield name.removesuffix("#"), path
    for key in ("$anchor", "$dynamicAnchor"):
        if isinstance(anchor := schema.get(key), str):
            yield f"#{anchor}", path
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from _names(inner, f"{path}/{_step(key)}/{_step(name)}", depth + 1)
        elif key in _LIST and isinstance(value, list):
            for number, inner in enumerate(value):
                yield from _names(inner, f"{path}/{_step(key)}/{number}", depth + 1)
        elif key in _SCHEMA:
            yield from _names(value, f"{path}/{_step(key)}", depth + 1)


def _step(name: str) -> str:
    """A name as a step of a pointer in a URI."""
    return quote(str(name).replace("~", "~0").replace("/", "~1"), safe="$~!&'()*+,;=:@")


@dataclass
class _Work:
    base: str
    names: dict[str, str]
    unenforced: list[str] = field(default_factory=list)

    def schema(self, schema: Any, path: str, depth: int) -> Any:
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return schema
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if (value is None and key not in {"const", "default"}) or (
                key in _ANNOTATIONS and isinstance(value, str | bool)
            ):
                continue
            here = f"{path}/{_step(key)}"
            if key in {"$ref", "$dynamicRef", "$recursiveRef"} and isinstance(value, str):
                out["$ref"] = self._moved(value)
            elif key in _DATA:
                out[key] = value
            elif key in _BY_NAME and isinstance(value, Mapping):
                out[key] = {k: self.schema(v, f"{here}/{_step(k)}", depth + 1) for k, v in value.items()}
            elif key in _LIST and isinstance(value, list):
                out[key] = [self.schema(v, f"{here}/{number}", depth + 1) for number, v in enumerate(value)]
            elif key in _SCHEMA:
                out[key] = self.schema(value, here, depth + 1)
            else:
                out[key] = value
        return self._simplified(out, path)

    def _moved(self, target: str) -> str:
        """A reference, after the schema has moved to the base."""
        document, _, fragment = target.partition("#")
        at = self.names.get(target) or self.names.get(target.removesuffix("#"))
        if at is None and document in self.names:
            at = f"{self.names[document]}{fragment}" if fragment.startswith("/") else self.names.get(f"#{fragment}")
        if at is None:
            if document:
                return target  # of another document: the compiler refuses it
            at = f"#{fragment}" if not fragment or fragment.startswith("/") else target
        # A step is a pointer's already: only what a URI cannot hold is escaped.
        steps = [quote(unquote(step), safe="$~!&'()*+,;=:@") for step in at[1:].split("/")]
        return self.base + "/".join(steps)

    def _simplified(self, out: dict[str, Any], path: str) -> Any:
        if out.get("uniqueItems") is False:
            del out["uniqueItems"]
        if "format" in out and out["format"] not in _FORMATS:
            del out["format"]  # an annotation, as JSON Schema defines unknown formats
        if "not" in out:
            if out["not"] in _NEVER:
                return False
            if out["not"] is False:
                del out["not"]
        if "contains" not in out:
            out.pop("minContains", None)
            out.pop("maxContains", None)
        if "if" not in out or not {"then", "else"} & set(out):
            for key in ("if", "then", "else"):
                out.pop(key, None)
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if out.get(key) == {}:
                del out[key]
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if out.get(key) in _NEVER:
                del out[key]
        self._names_of_properties(out)
        self._patterns_of_properties(out)
        for key in (key for key in _CANNOT if key in out):
            self._give_up(out, key, path)
        if out.get("uniqueItems") is True:
            if out.get("maxItems") in {0, 1}:
                del out["uniqueItems"]
            else:
                self._give_up(out, "uniqueItems", path)
        if isinstance(pattern := out.get("pattern"), str) and _LOOK_AROUND.search(pattern):
            self._give_up(out, "pattern", path)
        return out

    def _give_up(self, out: dict[str, Any], key: str, path: str) -> None:
        del out[key]
        self.unenforced.append(f"{path}/{_step(key)}")

    @staticmethod
    def _names_of_properties(out: dict[str, Any]) -> None:
        """`propertyNames` says nothing, or is written with `properties` or `patternProperties` instead."""
        names = out.get("propertyNames")
        if names is True or (isinstance(names, Mapping) and set(names) <= {"type", "title", "description"}):
            if not isinstance(names, Mapping) or names.get("type", "string") == "string":
                del out["propertyNames"]
        elif isinstance(names, Mapping) and not {"properties", "patternProperties"} & set(out):
            values = out.get("additionalProperties", True)
            listed = [names["const"]] if "const" in names else names.get("enum")
            if isinstance(listed, list) and set(names) <= {"type", "title", "description", "enum", "const"}:
                out["properties"] = {name: values for name in listed if isinstance(name, str)}
            elif isinstance(names.get("pattern"), str) and set(names) <= {"type", "title", "description", "pattern"}:
                if _LOOK_AROUND.search(names["pattern"]):
                    return
                out["patternProperties"] = {names["pattern"]: values}
            else:
                return
            out["additionalProperties"] = False
            del out["propertyNames"]

    @staticmethod
    def _patterns_of_properties(out: dict[str, Any]) -> None:
        """A pattern that matches a named property narrows it; no other property then matches the pattern.

        The compiler would follow only one of both, and end in an error in the middle of an answer.
        """
        patterns, properties = out.get("patternProperties"), out.get("properties")
        if not isinstance(patterns, Mapping) or not isinstance(properties, Mapping):
            return
        over = {p: [name for name in properties if _matches(p, name)] for p in patterns}
        if not any(over.values()):
            return
        narrowed = dict(properties)
        for pattern, names in over.items():
            for name in names:
                narrowed[name] = {"allOf": [narrowed[name], patterns[pattern]]}
        out["properties"] = narrowed
        out["patternProperties"] = {p: patterns[p] for p in patterns if not over[p]}
        out["additionalProperties"] = False


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError):
        return False  # the compiler refuses it
