"""The folders of the parts never shadow what they are named after."""

import operator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.capability("PF-26")
def test_the_folder_operator_is_not_a_package_and_the_standard_library_stays_reachable():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.__file__ is not None
    assert not Path(operator.__file__).is_relative_to(ROOT / "operator")
    assert operator.add(1, 1) == 2


@pytest.mark.capability("PF-26")
@pytest.mark.parametrize("folder", ["operator", "runtime", "gateway", "agent", "api", "kube"])
def test_the_folders_of_the_parts_hold_packages_and_are_none(folder):
    assert not (ROOT / folder / "__init__.py").exists()
