"""The label `slipway.dev/state` is read in one place: `slipway_api.pod_labels`, whose default is "not serving"."""

import ast
from pathlib import Path

import pytest

from slipway_api import names

ROOT = Path(__file__).parent.parent
PARTS = (
    *(
        "api/slipway_api",
        "kube/slipway_kube",
        "gateway/slipway_gateway",
        "runtime/slipway_runtime",
        "agent/slipway_agent",
    ),
    *("operator/slipway_operator", "operator/slipway_cli"),
)
READER = "api/slipway_api/pod_labels.py"
DEFINITION = "api/slipway_api/names.py"


def is_key(node: ast.AST) -> bool:
    named = isinstance(node, ast.Attribute) and node.attr == "LABEL_STATE"
    return named or (isinstance(node, ast.Name) and node.id == "LABEL_STATE") or is_text(node)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == names.LABEL_STATE


def reads(source: str) -> list[int]:
    """The lines that look the label up in a mapping, or that spell its key."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            looks_up = node.func.attr in ("get", "pop", "setdefault") and any(is_key(one) for one in node.args[:1])
        elif isinstance(node, ast.Subscript):
            looks_up = is_key(node.slice) and isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Compare):
            operators = zip(node.ops, [node.left, *node.comparators], strict=False)
            looks_up = any(isinstance(one, ast.In | ast.NotIn) and is_key(left) for one, left in operators)
        else:
            looks_up = is_text(node)
        if looks_up:
            found.append(node.lineno)
    return found


@pytest.mark.capability("OP-16")
def test_one_function_reads_the_state_label_for_all_parts():
    """review/control-plane.md 6"""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for part in PARTS
        for path in sorted((ROOT / part).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in (READER, DEFINITION)
        for line in reads(path.read_text())
    ]

    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "x = pod.labels.get(names.LABEL_STATE)",
        "x = labels.get(LABEL_STATE, 'serving')",
        "x = labels[names.LABEL_STATE]",
        "x = names.LABEL_STATE in labels",
        "x = labels.get('slipway.dev/state')",
    ],
)
def test_the_search_finds_such_a_read(line):
    assert reads(line)
    assert not reads("labels = {names.LABEL_STATE: names.STATE_SERVING}")
