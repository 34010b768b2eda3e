"""The folders that `make test-apiserver` and `make test-cluster` collect hold every test with their marks."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ELSEWHERE = {  # mark -> folders of `tests` that the Makefile's targets do not collect for it
    "apiserver": ("runtime", "bench"),
    "cluster": tuple(path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "cluster"),
}


@pytest.mark.parametrize("mark", ELSEWHERE)
def test_no_marked_test_lies_in_a_folder_that_is_not_collected(mark: str) -> None:
    found = [
        str(path.relative_to(TESTS))
        for folder in ELSEWHERE[mark]
        for path in (TESTS / folder).rglob("*.py")
        if re.search(rf"mark\.{mark}\b", path.read_text())
    ]
    assert found == []
