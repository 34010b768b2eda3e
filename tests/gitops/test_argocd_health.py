"""Argo CD's health checks, run over their fixtures as Argo CD's own tests run them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa import lua51  # Argo CD's interpreter speaks Lua 5.1

from slipway_api.conditions import ConditionType

CHECKS = Path(__file__).resolve().parents[2] / "gitops" / "argocd" / "slipway.dev"


def health(script: str, resource: dict[str, Any]) -> dict[str, str]:
    """What the script says of a resource, which Argo CD hands it as the global `obj`."""
    lua = lua51.LuaRuntime(register_eval=False, unpack_returned_tuples=True)
    lua.globals()["obj"] = lua.table_from(resource, recursive=True)
    return dict(lua.execute(script))


CASES = [
    pytest.param(folder.name, case, id=f"{folder.name}-{Path(case['inputPath']).stem}")
    for folder in sorted(CHECKS.iterdir())
    for case in yaml.safe_load((folder / "health_test.yaml").read_text())["tests"]
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_resource_has_the_health_that_its_fixture_states(kind: str, case: dict[str, Any]) -> None:
    script = (CHECKS / kind / "health.lua").read_text()
    resource = yaml.safe_load((CHECKS / kind / case["inputPath"]).read_text())

    assert health(script, resource) == case["healthStatus"]


def test_fixtures_name_only_conditions_that_the_kind_has_or_will_have() -> None:
    later = {"Suspended"}  # spec.suspend is a later field of crd-api.md
    for path in CHECKS.glob("*/testdata/*.yaml"):
        conditions = yaml.safe_load(path.read_text()).get("status", {}).get("conditions", [])
        assert {one["type"] for one in conditions} <= set(ConditionType) | later, path.name


def test_every_fixture_is_used() -> None:
    for folder in CHECKS.iterdir():
        cases = yaml.safe_load((folder / "health_test.yaml").read_text())["tests"]
        assert {case["inputPath"] for case in cases} == {
            f"testdata/{one.name}" for one in (folder / "testdata").iterdir()
        }
