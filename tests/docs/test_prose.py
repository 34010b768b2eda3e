"""Text that users see avoids phrases that readers stumbled over: pages, chart, CRDs, help texts, conditions and events.

Some phrases are never used. Others are English, and too many of them make a text slow to read: they are counted.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.capability("UX-2")

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
    ROOT / "agent" / "slipway_agent",
    ROOT / "api" / "slipway_api",
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
    "mend(?:s|ed)?": "fix, correct",
    "obey(?:s|ed)?": "apply",
    "(?:go|goes|going|went) on(?! (?:the|a|an|its)\\b)": "continue",
    "for so (?:long|much|many)": "the name of the value",
    "as late as leaves": "the time before which it ends",
    "the one before": "the previous …",
}
# What a running system says to people is held to more of CONTRIBUTING's table than pages are.
IN_SENTENCES = {
    r"(?<!there )is no (?!longer)[\w-]+": "is not a …",
    "(?:is|are|was|were) asked": "is requested, is called",
    "(?:go|goes|going) on": "continue",
    "mend(?:s|ed)?": "fix",
    "for so long": "the time, or for how many seconds",
}

# Each is right in some sentence. In all texts of one kind together they are at most this many in 1,000 words.
MOST_IN_1000_WORDS = 0.6
_THING = "gateway|operator|replica|runtime|engine|file|page|field|message|condition|status|log|name|taint|event"
COUNTED = {
    r"[,;(] ?where (?:there|no|nothing|one|it is|they are|the|a|an)\b(?! [\w-]+ (?:was|were|took))": "if, when",
    r"\b(?:only|except|also|even|but) where\b": "if, when",
    r"(?:(?<=[.:;] )|^)Where (?!to\b)[^.|?]{3,80}?,": "If …,",
    r"(?:(?<=[.:;] )|^)What (?!is\b|are\b|does\b|happens\b|to\b)[\w ]+ (?=is|are|was|has|counts)\b": "a noun",
    r"\bof which\b": "a clause of its own",
    r"\b(?:is|are|was|were|be|been|being) asked\b": "is requested, is sent to",
    rf"\b(?:{_THING})s? (?:knows?|tells?|says?)\b": "shows, contains, reports",
    r"\b(?:has|have|had|makes?) none\b": "has no …",
    r"\b(?:has|have|no|after|with) so (?:many|long|much)\b": "the name of the value",
    r"\bone that\b": "the noun again",
    r"\bthose (?:of|that|which|who)\b": "the noun again",
    r"\b(?:begins?|began|begun)\b": "start",
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


def prose(page: Path) -> str:
    """The text of a page: without blocks of code, and of a template or a values file the comments."""
    text = page.read_text()
    if page.suffix == ".md":
        return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    if page.suffix in (".tpl", ".yaml") and "files" not in page.parts:
        comments = re.findall(r"(?:^|\s)# (.*)$|\{\{-? ?/\*(.*?)\*/", text, re.MULTILINE | re.DOTALL)
        return "\n".join(line or block for line, block in comments)
    return text


def texts() -> dict[str, list[str]]:
    """All texts that users see, by kind. The descriptions of the CRDs are on the generated pages of the API."""
    pages = [page for page in PAGES if page.suffix != ".py"]
    api = [page for page in pages if page.name.startswith("api")]
    chart = [page for page in pages if CHART in page.parents]
    rest = [page for page in pages if page not in (*api, *chart) and page.name != "CHANGELOG.md"]
    return {
        "pages": [prose(page) for page in rest],
        "changelog": [(ROOT / "CHANGELOG.md").read_text()],
        "descriptions of the CRDs": [prose(page) for page in api],
        "chart": [prose(page) for page in chart],
        "sentences of programs": [text for source in SOURCES for _, text in sentences(source.read_text())],
    }


def rate(found: Iterable[str]) -> tuple[float, list[str]]:
    """Counted phrases in 1,000 words, and each of them with the words around it."""
    words, hits = 0, []
    for text in found:
        words += len(re.findall(r"[A-Za-z][A-Za-z']*", text))
        for line in text.splitlines():
            for phrase, instead in COUNTED.items():
                case = re.NOFLAG if "?<=" in phrase else re.IGNORECASE
                for hit in re.finditer(phrase, line, case):
                    hits.append(f"{line[max(0, hit.start() - 40) : hit.end() + 30]!r}; write {instead}")
    return 1000 * len(hits) / max(words, 1), hits


@pytest.mark.parametrize("kind", ["pages", "changelog", "descriptions of the CRDs", "chart", "sentences of programs"])
def test_counted_phrases_are_rare_in(kind):
    found, hits = rate(texts()[kind])

    assert found <= MOST_IN_1000_WORDS, f"{found:.2f} in 1,000 words\n" + "\n".join(hits)


def test_each_counted_phrase_is_found():
    wrong = [
        "a token, where the model needs one", "only where it is on", "Where it fails, it ends.",
        "What fails for ever is lost",
        "adapters of which few are used", "the replica is asked", "the log says why", "it has none",
        "no so many are left",
        "one that waits", "those of the pod", "it begins",
    ]  # fmt: skip

    assert [len(rate([line])[1]) for line in wrong] == [1] * len(COUNTED)
    assert rate(["It starts if the model needs a token. The operator reports why, beyond the one thousandth."])[0] == 0


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
