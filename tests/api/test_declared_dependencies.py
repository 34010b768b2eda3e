"""Each part starts with the packages that it declares: those of every part, and those of its own extra.

All tests share one environment with all extras. Here, a part is imported in a process that cannot see the packages of
the other extras, as in its image.
"""

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [str(ROOT / folder) for folder in ("api", "kube", "operator", "runtime", "gateway", "agent")]

# What runs -> the extra that is installed for it, and the modules that its start imports.
STARTS = {
    "operator": ("operator", ["slipway_operator.main", "slipway_operator.serve"]),
    "gateway": ("gateway", ["slipway_gateway.main", "slipway_gateway.serve"]),
    "agent": ("agent", ["slipway_agent.main", "slipway_agent.serve"]),
    "runtime": ("runtime", ["slipway_runtime.main", "slipway_runtime.command_line", "slipway_runtime.serve"]),
    "engine": ("runtime", ["slipway_runtime.engine.process", "slipway_runtime.engine.build"]),
    "cli": ("cli", ["slipway_cli.main"]),
}
# Extras that only an option of the part needs; its image has them too.
OPTIONAL = {"gateway": ["otel"]}

CHILD = """
import importlib, json, sys

hidden, sources, modules = json.loads(sys.stdin.read())


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
sys.path[:0] = sources
for module in modules:
    importlib.import_module(module)
files = [getattr(m, "__file__", None) for name, m in sys.modules.items() if name.startswith("slipway_")]
print(json.dumps([file for file in files if file]))
"""


def closure(requirements: list[str]) -> set[str]:
    """The names of the distributions that pip installs for these requirements, on this machine."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [(Requirement(text), wanted) for text in needs for wanted in ("", *requirement.extras)]
    return found


def declared(*extras: str) -> list[str]:
    optional = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]


@cache
def environment() -> dict[str, list[str]]:
    """The top-level modules of this environment, with the distributions that each belongs to."""
    return dict(metadata.packages_distributions())


@cache
def modules_outside(*extras: str) -> frozenset[str]:
    """Top-level modules of this environment that an environment with only these extras does not have."""
    inside = closure(declared(*extras))
    return frozenset(
        module
        for module, distributions in environment().items()
        if not module.startswith("slipway_") and not any(canonicalize_name(one) in inside for one in distributions)
    )


def imported_files(hidden: frozenset[str], modules: list[str]) -> list[Path]:
    """Imports the modules while the hidden ones do not exist; returns the files of ours that this has loaded."""
    given = json.dumps([sorted(hidden), SOURCES, modules])
    done = subprocess.run([sys.executable, "-c", CHILD], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
    return [Path(name) for name in json.loads(done.stdout)]


def third_party_imports(file: Path) -> set[str]:
    """Top-level modules that a file imports anywhere, also in functions; not those for the type checker only."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return {name for name in found if name not in sys.stdlib_module_names and not name.startswith("slipway_")}


@pytest.mark.parametrize("part", STARTS)
def test_a_part_starts_and_runs_with_the_packages_that_it_declares(part):
    """review/containers.md 1: gateway, runtime and CLI imported croniter, which only the operator declared."""
    extra, modules = STARTS[part]
    hidden = modules_outside(extra)

    loaded = imported_files(hidden, modules)

    assert loaded
    with_options = modules_outside(extra, *OPTIONAL.get(part, []))
    missing = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in [*loaded, *lazily_loaded(part)]
        for name in third_party_imports(file)
        if name in with_options or name not in environment()
    }
    assert missing == set()


def lazily_loaded(part: str) -> list[Path]:
    """Files of the part itself, which functions may import later; tools that no part runs are not among them."""
    folder = {
        "operator": "operator/slipway_operator",
        "gateway": "gateway/slipway_gateway",
        "agent": "agent/slipway_agent",
        "runtime": "runtime/slipway_runtime",
        "engine": "runtime/slipway_runtime",
        "cli": "operator/slipway_cli",
    }[part]
    return sorted((ROOT / folder).rglob("*.py"))


def test_packages_of_other_extras_are_really_hidden():
    """Otherwise the test above could not fail."""
    assert {"kopf", "torch", "typer"} <= modules_outside("gateway")
    assert {"aiohttp", "kubernetes", "pydantic", "croniter", "dateutil"}.isdisjoint(modules_outside("gateway"))
    with pytest.raises(AssertionError, match="No module named 'kopf'"):
        imported_files(modules_outside("gateway"), ["slipway_operator.handlers"])


@pytest.mark.parametrize("extra", ["operator", "gateway", "agent", "runtime", "cli"])
def test_time_zones_are_there_on_a_machine_without_any(extra):
    """The kinds check time zones, and an image has none of its own."""
    assert "tzdata" not in modules_outside(extra)
