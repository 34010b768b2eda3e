"""Takes the notes of a version from CHANGELOG.md: sections `## Unreleased` and `## 0.1.0 (2026-12-01)`. Pure."""

import re
from typing import Final

HEADING: Final = re.compile(r"^## (?P<version>Unreleased|\d+\.\d+\.\d+)(?: \(\d{4}-\d\d-\d\d\))?$", re.MULTILINE)


def versions(changelog: str) -> list[str]:
    """The versions of the sections, the newest first; without `Unreleased`."""
    return [found["version"] for found in HEADING.finditer(changelog) if found["version"] != "Unreleased"]


def notes(changelog: str, version: str) -> str:
    """The section of a version, without its heading. Raises LookupError if there is none, or if it is empty."""
    headings = list(HEADING.finditer(changelog))
    for number, found in enumerate(headings):
        if found["version"] == version:
            end = headings[number + 1].start() if number + 1 < len(headings) else len(changelog)
            if text := changelog[found.end() : end].strip():
                return text + "\n"
            break
    raise LookupError(f"CHANGELOG.md has no section '## {version} (DATE)' with text: rename '## Unreleased' to it")
