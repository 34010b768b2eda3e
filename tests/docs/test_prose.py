"""Pages, chart, API descriptions and sentences of programs avoid phrases that readers stumbled over (CONTRIBUTING)."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"capabilities.md", "code-map.md", "gpu-ledger.md"}  # from docstrings, and from the output of a tool
CHART = ROOT / "charts" / "slipway"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "gitops/README.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED),
    *(CHART / name for name in ("README.md", "values.yaml", "files/alerts.yaml")),
    *sorted((CHART / "files" / "dashboards").glob("*.json")),
    *sorted((CHART / "templates").rglob("*.*")),
    *sorted((ROOT / "api" / "slipway_api").glob("*.py")),
]
# Their conditions, events, error messages, log lines and help texts are what people read of a running system.
PROGRAMS = [
    *(ROOT / "operator" / name for name in ("slipway_operator", "slipway_cli")),
    ROOT / "gateway" / "slipway_gateway",
    ROOT / "runtime" / "slipway_runtime",
    ROOT / "kube" / "slipway_kube",
]
SOURCES = [source for program in PROGRAMS for source in sorted(program.rglob("*.py"))]
INSTEAD = {
    "at once": "immediately, or concurrently",
    "for good": "permanently",
    "by hand": "manually",
    "beforehand": "in advance",
    "meanwhile": "in the meantime",
    "(?:is|are) told": "is reported, is sent to",
    "(?<!there )is no [a-z]+ of": "is not a … of",
}
# What a running system says to people is held to more of CONTRIBUTING's table than pages are.
IN_SENTENCES = {
    r"(?<!there )is no (?!longer)[\w-]+": "is not a …",
    "(?:is|are|was|were) asked": "is requested, is called",
    "(?:go|goes|going) on": "continue",
    "mend(?:s|ed)?": "fix",
    "for so long": "the time, or for how many seconds",
}


def phrases(text: str, replacements: Mapping[str, str] = INSTEAD) -> list[str]:
    """The phrases found, each with its line and its replacement."""
    return [
        f"line {number}: {found[0]!r}; write {instead}"
        for number, line in enumerate(text.splitlines(), 1)
        for phrase, instead in replacements.items()
        for found in re.finditer(rf"\b{phrase}\b", line, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page):
    assert phrases(page.read_text()) == []


def sentences(code: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each string of two words or more; values in f-strings become `{}`. No docstrings."""
    tree = ast.parse(code)
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        if isinstance(node, ast.JoinedStr):
            silent |= {id(part) for part in node.values}
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_the_sentences_of_a_program_are_in_plain_english(source):
    stated = sentences(source.read_text())
    found = [f"line {line}: {told}" for line, text in stated for told in phrases(text, INSTEAD | IN_SENTENCES)]
    assert found == []


def test_each_phrase_of_a_sentence_is_found():
    wrong = ["it is no JSON", "42 bytes are asked for", "the rollout goes on", "until this is mended", "for so long"]
    right = "there is no Secret x; it is no longer there; a mending"

    told = phrases("\n".join([*wrong, right]), IN_SENTENCES)
    assert [one.split(":")[0] for one in told] == [f"line {number}" for number in range(1, 6)]


def test_the_sentences_of_a_program_are_its_strings_without_docstrings():
    code = '''
"""At once, in a docstring."""
log.info("the pod goes at once", one="at")
raise Refused(
    f"{name} is done by hand"
    f" {value} at once"
)
def function():
    """By hand."""
'''

    assert list(sentences(code)) == [(3, "the pod goes at once"), (5, "{} is done by hand {} at once")]


def test_each_phrase_is_found():
    wrong = ["At once", "for good", "by hand", "beforehand", "Meanwhile", "is told", "nopod is no replica of chat"]
    text = "\n".join([*wrong, "goods, offhand, told"])

    assert [entry.split(":")[0] for entry in phrases(text)] == [f"line {number}" for number in range(1, 8)]
