"""Release notes are a section of the changelog."""

import re

import pytest

import slipway_api
from release import changelog
from release.chart import ROOT

TEXT = """# Changelog

## Unreleased

- next

## 0.2.0 (2027-01-02)

### A topic

- **Fixed**: this

## 0.1.0 (2026-12-01)

- the first
"""


def changelog_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_notes_of_a_version_are_its_section():
    assert changelog.versions(TEXT) == ["0.2.0", "0.1.0"]
    assert changelog.notes(TEXT, "0.2.0") == "### A topic\n\n- **Fixed**: this\n"
    assert changelog.notes(TEXT, "0.1.0") == "- the first\n"


@pytest.mark.parametrize("version", ["0.3.0", "0.2", "Unreleased\n"])
def test_a_version_without_notes_is_not_released(version):
    with pytest.raises(LookupError, match=re.escape(f"no section '## {version} (DATE)'")):
        changelog.notes(TEXT, version)


def test_a_section_without_text_is_not_released():
    with pytest.raises(LookupError):
        changelog.notes("## 1.0.0 (2027-01-01)\n\n## 0.1.0 (2026-12-01)\n- text\n", "1.0.0")


@pytest.mark.capability("PL-14")
def test_the_changelog_of_this_checkout_can_be_read_and_names_no_later_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]

    assert headings
    assert all(changelog.HEADING.match(line) for line in headings)
    numbers = [changelog_number(version) for version in changelog.versions(text)]
    assert numbers == sorted(numbers, reverse=True)
    assert all(number <= changelog_number(slipway_api.__version__) for number in numbers)
