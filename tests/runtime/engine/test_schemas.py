"""References move with their schema, what says nothing is dropped, and what cannot be enforced is named by its path.

review/api-users.md 8, 9, 14.
"""

import datetime
import decimal
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import (
    UUID4,
    AnyUrl,
    Base64Bytes,
    BaseModel,
    ByteSize,
    Field,
    FilePath,
    HttpUrl,
    Json,
    JsonValue,
    PositiveInt,
    SecretStr,
    create_model,
)  # fmt: skip

from slipway_runtime.engine.grammar import GrammarCompiler
from slipway_runtime.engine.schemas import prepared
from slipway_runtime.messages import Grammar
from slipway_runtime.server.chat_types import Tool
from slipway_runtime.server.tools import arguments_of, schema_of_calls
from tests.runtime.server.serving import TINY

COMPILER = GrammarCompiler((TINY / "tokenizer.json").read_text(), eos_token_ids=(2,))


def takes(schema: Any, text: str) -> bool:
    matcher = COMPILER.matcher(Grammar(kind="json_schema", text=json.dumps(schema)))
    tokens = COMPILER.vocabulary.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def a_tool(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


LEAVES: list[dict[str, Any]] = [{"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"enum": ["S", 1]}]
LEAF = st.sampled_from(LEAVES)
REFERENCES = [
    "#", "#/$defs/X", "#/definitions/Y", "#/properties/a", "#/$defs/X/anyOf/1", "#/$defs/a~1b%20c", "#mark", "urn:own",
    "urn:own#/$defs/X",
]  # fmt: skip


@st.composite
def schemas_with_references(draw: st.DrawFn) -> dict[str, Any]:
    names = st.sampled_from(["b", "c", "$ref", "d/e"])
    fields = draw(st.dictionaries(names, st.sampled_from(REFERENCES).map(lambda target: {"$ref": target}), max_size=3))
    return {
        "$id": "urn:own",
        "type": "object",
        "properties": {"a": draw(LEAF), **fields},
        "$defs": {
            "X": {"anyOf": [draw(LEAF), {"$anchor": "mark", "type": "null"}]},
            "a/b c": draw(LEAF),
        },
        "definitions": {"Y": {"type": "array", "items": {"$ref": "#/$defs/X"}, "maxItems": 2}},
        "additionalProperties": False,
    }


VALUES = st.recursive(
    st.sampled_from([1, "S", "x", True, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "c", "$ref", "d/e"]), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(schemas_with_references(), min_size=1, max_size=3), st.integers(0, 2), VALUES)
def test_a_function_means_the_same_alone_and_among_others(schemas: list[dict[str, Any]], which: int, value: Any):
    """review/api-users.md 8."""
    tools = tuple(a_tool(f"f{number}", schema) for number, schema in enumerate(schemas))
    which %= len(tools)
    ordered = (
        sorted(value.items(), key=lambda item: list(schemas[which]["properties"]).index(item[0]))
        if (isinstance(value, dict) and set(value) <= set(schemas[which]["properties"]))
        else None
    )
    arguments = json.dumps(dict(ordered) if ordered is not None else value)

    alone = takes(arguments_of(tools[which]), arguments)
    among = takes(schema_of_calls(tools, None), f'[{{"name": "f{which}", "parameters": {arguments}}}]')

    assert alone == among
    if alone:
        assert Draft202012Validator(schemas[which]).is_valid(json.loads(arguments))


def test_the_root_of_a_tree_is_the_function_and_not_the_list_of_calls():
    tree = a_tool("tree", {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False})
    schema = schema_of_calls((tree, a_tool("other", {"type": "object"})), None)

    assert takes(schema, '[{"name": "tree", "parameters": {"left": {"left": {}}}}]')
    assert not takes(schema, '[{"name": "tree", "parameters": {"left": [{"name": "tree", "parameters": {}}]}}]')


SAY_NOTHING: list[dict[str, Any]] = [
    {"type": "string", "format": "path"},
    {"type": "string", "format": "uuid4"},
    {"type": "string", "format": "binary"},
    {"type": "string", "format": "idn-email"},
    {"type": "array", "uniqueItems": False},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "array", "minContains": 2},
    {"type": "object", "propertyNames": {"type": "string"}},
    {"type": "object", "propertyNames": True},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "required": None, "properties": None, "description": None},
    {"type": "object", "dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}},
    {"type": "object", "properties": {"never": {"not": {}}, "a": {"not": False}}},
    {"type": "object", "unevaluatedProperties": True},
    {"type": "object", "if": {"required": ["a"]}},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "x", "type": "object"},
    {"$schema": "own", "$id": "https://example.com/x.json", "type": "object"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "object", "properties": {"format": {"type": "string"}, "uniqueItems": {"const": True}}},
]


@pytest.mark.parametrize("schema", SAY_NOTHING, ids=str)
def test_annotations_and_keywords_without_effect_are_never_refused(schema: dict[str, Any]):
    """review/api-users.md 9."""
    ready = prepared(schema)

    assert ready.unenforced == []
    COMPILER.check(Grammar(kind="json_schema", text=json.dumps(ready.schema)))


class Tree(BaseModel):
    left: "Tree | None" = None


FIELD_TYPES: list[Any] = [
    bytes, datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, UUID4, decimal.Decimal,
    pathlib.Path, FilePath, ipaddress.IPv4Address, ipaddress.IPv4Network, re.Pattern, AnyUrl, HttpUrl, SecretStr, Json,
    Base64Bytes, ByteSize, JsonValue, Tree, Any, set[int], frozenset[str], tuple[int, str], tuple[int, ...],
    dict[str, int], dict[Literal["a", "b"], int], dict[datetime.date, int], dict[uuid.UUID, str], list[Tree],
    Annotated[str, Field(pattern="^a", max_length=3)], Literal[1, "x", None], PositiveInt,
]  # fmt: skip
# No grammar counts what is in a list, or binds a name to a format.
IMPOSSIBLE: Any = {
    "uniqueItems": (set[int], frozenset[str]),
    "propertyNames": (dict[datetime.date, int], dict[uuid.UUID, str]),
}


@pytest.mark.parametrize("field", FIELD_TYPES, ids=str)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_fields_of_pydantic_models_are_bound(field: Any, mode: Any):
    """review/api-users.md 9: 16 of 56 types were refused."""
    schema = create_model("M", field=(field, ...)).model_json_schema(mode=mode)
    ready = prepared(schema)

    COMPILER.check(Grammar(kind="json_schema", text=json.dumps(ready.schema)))
    impossible = [keyword for keyword, types in IMPOSSIBLE.items() if field in types]
    assert ready.unenforced == [f"#/properties/field/{keyword}" for keyword in impossible]


def test_names_of_properties_are_still_bound():
    listed = prepared({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "integer"}})

    assert takes(listed.schema, '{"a": 1}')
    assert not takes(listed.schema, '{"a": "x"}')
    assert not takes(listed.schema, '{"b": 1}')
    assert not takes(prepared({"type": "object", "properties": {"never": {"not": {}}}}).schema, '{"never": 1}')


CANNOT: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a b": {"type": "array", "uniqueItems": True}}}, "#/properties/a%20b/uniqueItems"),
    ({"$defs": {"X": {"pattern": "^(?!a)b"}}, "anyOf": [{"$ref": "#/$defs/X"}]}, "#/$defs/X/pattern"),
    ({"type": "array", "contains": {"type": "integer"}}, "#/contains"),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "#/if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
]


@pytest.mark.parametrize(("schema", "path"), CANNOT, ids=[path for _, path in CANNOT])
def test_what_cannot_be_enforced_is_named_by_its_path(schema: dict[str, Any], path: str):
    ready = prepared(schema)

    assert ready.unenforced[0] == path
    COMPILER.check(Grammar(kind="json_schema", text=json.dumps(ready.schema)))


@pytest.mark.parametrize("pattern", ["^score$", "s", "^sc"])
def test_a_pattern_over_a_named_property_holds_for_it_to_the_end_of_the_answer(pattern: str):
    """review/api-users.md 14: such a schema compiled, and failed in the middle of the answer."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "number"}},
        "required": ["score"],
        "patternProperties": {pattern: {"type": "integer"}},
    }
    ready = prepared(schema).schema

    assert takes(ready, '{"score": 12}')
    assert not takes(ready, '{"score": 1.5}')
    assert not takes(ready, '{"score": "x"}')
