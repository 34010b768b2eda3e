"""pydantic's schema becomes one that Kubernetes accepts, or an error that says what cannot be said."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from slipway_api.structural import structural, without_defaults
from slipway_api.types import DecimalString, Struct, bounded_list, decimal


def schema_of(kind):
    return structural(kind.model_json_schema(by_alias=True))


class Leaf(Struct):
    """A leaf."""

    ratio: DecimalString = decimal("0.80")
    """A share."""
    name: str = ""
    """A name."""


class Tree(Struct):
    """A tree."""

    leaf: Leaf = Leaf()
    """The leaf of the tree."""
    extra: Leaf | None = None
    """May be absent."""
    count: int | None = Field(default=None, ge=1)
    """How many."""
    mode: Literal["Only"] = "Only"
    """One word."""
    leaves: Annotated[tuple[Leaf, ...], bounded_list(at_most=3, key="name")] = ()
    """More leaves."""


def test_references_titles_nulls_and_constants_are_gone():
    schema = schema_of(Tree)

    assert schema["properties"]["count"] == {
        "description": "How many.",
        "type": "integer",
        "format": "int64",
        "minimum": 1,
    }
    assert schema["properties"]["mode"]["enum"] == ["Only"]
    text = str(schema)
    assert not [word for word in ("$ref", "$defs", "anyOf", "title", "const", "'null'") if word in text]


def test_a_struct_that_may_be_left_out_brings_the_defaults_inside_it():
    properties = schema_of(Tree)["properties"]

    assert properties["leaf"]["default"] == {"ratio": "0.80"}
    assert properties["leaf"]["properties"]["ratio"]["default"] == "0.80"
    assert properties["leaf"]["description"] == "The leaf of the tree."


def test_what_is_optional_has_no_default_and_empty_defaults_are_not_written():
    properties = schema_of(Tree)["properties"]

    assert "default" not in properties["extra"]
    assert "default" not in properties["leaves"]
    assert "default" not in properties["leaf"]["properties"]["name"]


def test_lists_carry_their_limit_and_their_key():
    leaves = schema_of(Tree)["properties"]["leaves"]

    assert leaves["maxItems"] == 3
    assert leaves["x-kubernetes-list-type"] == "map"
    assert leaves["x-kubernetes-list-map-keys"] == ["name"]


def test_a_status_has_no_defaults_at_any_depth():
    assert "default" not in str(without_defaults(schema_of(Tree)))


class Wordy(Struct):
    """Words of a docstring
    that goes on.

    And begins anew.
    """


def test_a_description_has_paragraphs_but_no_lines():
    assert schema_of(Wordy)["description"] == "Words of a docstring that goes on.\n\nAnd begins anew."


class Either(Struct):
    """Cannot be said."""

    value: int | Leaf = 1


class Open(Struct):
    """Cannot be said either: Kubernetes has a boolean where JSON schema has a number."""

    value: int = Field(default=1, gt=0)


@pytest.mark.parametrize("kind", [Either, Open])
def test_what_a_structural_schema_cannot_say_is_an_error_here_and_not_on_the_cluster(kind):
    with pytest.raises(ValueError, match="a structural schema cannot express"):
        schema_of(kind)
