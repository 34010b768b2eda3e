"""Types of the fields of the kinds: quantities, decimals, times, references; and how a field carries a CEL rule.

Kubernetes conventions forbid floats in a spec, so ratios travel as pattern-checked decimal strings and become
`decimal.Decimal` here; quantities such as `64Mi` stay strings and are read by `parse_quantity`.
"""

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo


class Struct(BaseModel):
    """A part of a kind: camelCase in YAML, snake_case in Python, frozen.

    Unknown fields are ignored, so that an older operator survives a newer resource. The docstrings of classes and of
    fields are what `kubectl explain` prints.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def to_json(self) -> dict[str, Any]:
        """The object as the API server takes it: camelCase, absent stays absent."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Rule(NamedTuple):
    """One CEL rule of the CRD: `expression` must hold for `self`, else the API server answers `message`."""

    expression: str
    message: str
    field_path: str = ""  # where the error points, such as `.maxReplicas`; empty: the object itself

    def to_json(self) -> JsonDict:
        """The entry of `x-kubernetes-validations`."""
        entry: JsonDict = {"rule": self.expression, "message": self.message}
        return entry | {"fieldPath": self.field_path} if self.field_path else entry


def cel_rules(*rules: Rule) -> ConfigDict:
    """The `model_config` of a struct that carries CEL rules."""
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": [rule.to_json() for rule in rules]})


def bounded_list(*, at_most: int, key: str | tuple[str, ...] = ()) -> FieldInfo:
    """A list with a limit; with `key`, a map that server-side apply merges entry by entry.

    Every list has a limit: a CEL rule over a list without one exceeds the API server's cost budget a hundredfold.
    """
    keys = (key,) if isinstance(key, str) else key
    kind: dict[str, Any] = {"x-kubernetes-list-type": "map" if keys else "atomic"}
    if keys:
        kind["x-kubernetes-list-map-keys"] = list(keys)
    info: FieldInfo = Field(max_length=at_most, json_schema_extra=kind)
    return info


# --- decimals -------------------------------------------------------------------------------------------------------

DECIMAL_PATTERN = "^[0-9]{1,9}([.][0-9]{1,6})?$"

# In YAML a string such as "0.80", in Python a Decimal that prints as the user typed it.
DecimalString = Annotated[
    Decimal,
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": DECIMAL_PATTERN, "maxLength": 16}),
]


def decimal_rule(field: str, bounds: str, message: str) -> Rule:
    """A rule over a decimal that may be absent; `bounds` says `value` for it, and text that is no number passes.

    Such text is refused by the pattern already: a second message about type conversion would only confuse.
    """
    name = f"self.{field}"
    in_bounds = bounds.replace("value", f"double({name})")
    return Rule(f"!has({name}) || !{name}.matches('{DECIMAL_PATTERN}') || ({in_bounds})", message, f".{field}")


def decimal(text: str) -> Decimal:
    """A default as the user would type it."""
    return Decimal(text)


# --- quantities -----------------------------------------------------------------------------------------------------

QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
BYTES_PATTERN = r"^([0-9]{1,18}([KMGTPE]i|[kMGTPE])?)?$"

# A resource quantity as Kubernetes takes it: 2, "500m", "4Gi".
Quantity = Annotated[
    str | int,
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN, "maxLength": 32}),
]
# A number of bytes such as "64Mi"; empty where nothing is asked for.
ByteQuantity = Annotated[str, Field(max_length=32)]

_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{suffix: Decimal(10) ** (3 * power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(QUANTITY_PATTERN)


def parse_quantity(quantity: str | int) -> Decimal:
    """The number behind a Kubernetes quantity: `"64Mi"` → 67108864, `"500m"` → 0.5, `"1e3"` → 1000."""
    match = _QUANTITY.match(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity such as 2, 500m or 64Mi")
    suffix = match[3] or ""
    if suffix in _SUFFIXES:
        return Decimal(match[1]) * _SUFFIXES[suffix]
    return Decimal(match[1] + suffix)


# --- times ----------------------------------------------------------------------------------------------------------


def rfc3339(moment: datetime) -> str:
    """The moment as Kubernetes writes it: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[datetime, PlainSerializer(rfc3339, return_type=str, when_used="json")]

# --- references and metadata ----------------------------------------------------------------------------------------


class ServiceKey(NamedTuple):
    """Which service: the one key type of work queue, caches and logs."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class LocalReference(Struct):
    """An object of the same namespace, by name."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the object."""


class ObjectMeta(Struct):
    """What the parts read of an object's metadata; they never write the user's."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
