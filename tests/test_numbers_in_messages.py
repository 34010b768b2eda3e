"""Law: a number and its noun agree in every message, for 0, 1 and 2; review/shipping.md 38.

Every f-string of operator, gateway and agent is examined: a value in front of a plural noun, or a verb behind a counted
noun, would be wrong for 1. `count` has singular and plural side by side.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway_operator.core.words import count

PACKAGES = [
    Path("operator/slipway_operator"),
    Path("operator/slipway_cli"),
    Path("gateway/slipway_gateway"),
    Path("agent/slipway_agent"),
]
ROOT = Path(__file__).parent.parent
PLURALS = (
    "replicas|pods|adapters|requests|nodes|times|GPUs|slots|prompts|tokens|revisions|calls|gateways|services|models|"
    "files|lines|sequences|characters|attempts|failures|restarts|keys|tenants|streams|objects|namespaces|events"
)
PLURAL_NOUN = re.compile(rf"^ (?:[a-z]+ )?(?:{PLURALS})\b")
PLURAL_VERB = re.compile(r"^ (?:are|have|were|do|wait|load|answer|need|differ|fail)\b")


def wrong_parts(text: ast.JoinedStr) -> Iterator[str]:
    """The parts of an f-string that are wrong if the value in front of them is 1."""
    for value, after in zip(text.values, text.values[1:], strict=False):
        if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
            continue
        is_counted = "count(" in ast.unparse(value.value)
        pattern = PLURAL_VERB if is_counted else PLURAL_NOUN
        if pattern.match(str(after.value)) and not is_text(value.value):
            yield f"{{{ast.unparse(value.value)}}}{after.value}"


def is_text(value: ast.expr) -> bool:
    """Whether the value is a name or a word, as the name of the variable says."""
    words = re.split(r"[^a-z]+", ast.unparse(value).lower())
    return bool({"name", "names", "kind", "noun", "reason", "reasons", "word", "type"} & set(words[-2:]))


def messages() -> list[tuple[str, str]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found += [(f"{path.relative_to(ROOT)}:{node.lineno}", part) for part in wrong_parts(node)]
    return found


def test_no_message_is_wrong_for_one():
    assert messages() == []


@pytest.mark.parametrize(
    ("template", "is_wrong"),
    [
        ('f"{n} replicas load it"', True),
        ('f"{n} ready replicas load it"', True),
        ("f\"{count(n, 'replica')} are ready\"", True),
        ("f\"{count(n, 'replica is', 'replicas are')} ready\"", False),
        ('f"{service.name} requests"', False),
        ('f"{n} of {m} is ready"', False),
    ],
)
def test_the_law_finds_what_it_looks_for(template, is_wrong):
    text = ast.parse(template, mode="eval").body

    assert bool(list(wrong_parts(text))) == is_wrong


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 replicas are ready"), (1, "1 replica is ready"), (2, "2 replicas are ready")]
)
def test_a_number_and_its_noun_agree(number, expected):
    assert f"{count(number, 'replica is', 'replicas are')} ready" == expected
