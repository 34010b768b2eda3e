"""No part reads an answer of another process without a bound: the other side would decide how much memory it takes."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = (
    "gateway/slipway_gateway",
    "agent/slipway_agent",
    "operator/slipway_operator",
    "operator/slipway_cli",
    "kube/slipway_kube",
)
WHOLE = {"read", "text", "json", "aread", "readlines", "form", "post"}  # without arguments: to the end


def unbounded_reads(source: str) -> list[int]:
    """The lines that await the whole of a body, or iterate over a body's lines with no limit of their own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Await) and isinstance(call := node.value, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name in WHOLE and not call.args and not call.keywords:
                found.append(node.lineno)
    return found


@pytest.mark.capability("SE-9")
def test_no_part_reads_the_whole_of_an_answer_without_a_bound():
    """review/control-plane.md 8"""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for part in PARTS
        for path in sorted((ROOT / part).rglob("*.py"))
        for line in unbounded_reads(path.read_text())
    ]

    assert found == []


@pytest.mark.parametrize("call", ["await response.read()", "x = await (await get()).json()", "await request.text()"])
def test_the_search_finds_such_a_read(call):
    assert unbounded_reads(f"async def f():\n    {call}") == [2]
    assert unbounded_reads("async def f():\n    await response.content.read(10)") == []
