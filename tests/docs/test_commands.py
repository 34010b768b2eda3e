"""Every fenced command of the documentation parses, and names what exists: files, verbs, options and chart values.

review/shipping.md 5, 19. The commands are not run here.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from slipway_cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "gitops" / "README.md",
    ROOT / "charts" / "slipway" / "README.md",
]
MAKE_VERBS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SCHEMA = json.loads((ROOT / "charts" / "slipway" / "values.schema.json").read_text())
CLI = typer.main.get_command(app)
FOLDERS = ("charts/", "examples/", "images/", "gitops/", "models/", "crds/", "e2e/", "bench/")


def blocks() -> Iterator[tuple[str, str]]:
    """Each fenced block of shell commands: where it is, and its text."""
    for page in PAGES:
        for match in re.finditer(
            r"^```(?:sh|bash|shell|console)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            line = page.read_text()[: match.start()].count("\n") + 1
            yield f"{page.relative_to(ROOT)}:{line}", match[1]


BLOCKS = list(blocks())
EACH = pytest.mark.parametrize(("place", "text"), BLOCKS, ids=[place for place, _ in BLOCKS])


def commands(text: str) -> list[str]:
    """Single commands of a block: continued lines joined, comments and here-documents removed."""
    text = re.sub(r"<<-?'?(\w+)'?(.*?)\n.*?^\1$", r"\2", text, flags=re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [
        part.strip() for line in lines for part in re.split(r"&&|\|\||;|\|", re.sub(r"(^|\s)#.*", "", line)) if part
    ]


def is_value(path: str) -> bool:
    """Whether the chart has a value of this name, such as gateway.service.port or imagePullSecrets[0].name."""
    schema = SCHEMA
    for name in re.sub(r"\[\d+\]", ".[]", path.replace("\\.", "\0")).split("."):
        if schema.get("additionalProperties", False) is not False and name not in schema.get("properties", {}):
            return True
        if name == "[]":
            schema = schema.get("items", {})
        elif name in schema.get("properties", {}):
            schema = schema["properties"][name]
        else:
            return schema.get("type") in ("object", "array") and "properties" not in schema
    return True


def test_there_are_commands_to_check():
    assert len(BLOCKS) > 20


@EACH
def test_a_block_is_valid_shell(place, text):
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)

    assert done.stderr == "", place


@EACH
def test_a_block_names_files_of_the_checkout_that_exist(place, text):
    named = {
        word.rstrip("/,.")
        for command in commands(text)
        for word in re.findall(r"(?<![\w/.:-])[\w./-]+", command)
        if word.startswith(FOLDERS) and "…" not in word
    }

    assert {name for name in named if not (ROOT / name).exists()} == set(), place


@EACH
def test_a_block_names_verbs_of_make_that_exist(place, text):
    verbs = {match for command in commands(text) for match in re.findall(r"^make ([a-z0-9-]+)", command)}

    assert verbs <= MAKE_VERBS, place


@EACH
def test_a_block_names_verbs_and_options_of_the_plugin_that_exist(place, text):
    for command in commands(text):
        match = re.search(r"\bkubectl[ -]slipway (.*)", command)
        words = match[1].split() if match else []
        if not words or words[0].startswith("-"):
            continue
        verb = CLI.commands.get(words[0])
        assert verb is not None, f"{place}: kubectl slipway {words[0]}"
        options = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words[1:] if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
        assert used - options - {"--help"} == set(), f"{place}: {command}"


@EACH
def test_a_block_sets_values_that_the_chart_has(place, text):
    for command in commands(text):
        if not re.match(r"helm (upgrade|install|template)\b", command):
            continue
        for quoted, plain in re.findall(r"--set(?:-json|-string)?[ =](?:['\"]([^'\"]+)['\"]|(\S+))", command):
            name = (quoted or plain).partition("=")[0]
            assert is_value(name), f"{place}: --set {name}"
        assert "--namespace" in command or " -n " in command, f"{place}: without a namespace it uses the context's"
        assert "--reuse-values" not in command, f"{place}: a newer chart lacks its new values then"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_installs_a_package_that_the_project_does_not_own(page):
    """On PyPI, `slipway` is a stranger's."""
    assert not re.search(r"pip3? install +['\"]?slipway\b", page.read_text())


def test_a_value_that_the_chart_does_not_have_is_noticed():
    """Otherwise a test above could not fail."""
    assert is_value("gateway.service.port")
    assert is_value("gateway.nodeSelector.a")
    assert not is_value("gateway.servce.port")
    assert not is_value("operator.replica")
