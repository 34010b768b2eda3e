"""The index of the architecture decisions lists each of them once, under its title, and links exist."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "adr"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")


def test_the_index_lists_each_decision_once_under_its_title():
    titles = {}
    for page in PAGES:
        title = re.match(r"# (\d+\. .+)\n", page.read_text())
        assert title is not None, f"{page.name} must begin with '# <number>. <decision>'"
        titles[page.name] = title[1]

    listed = re.findall(r"^- \[(.+?)\]\((\S+\.md)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)

    assert sorted((name, title) for title, name in listed) == sorted(titles.items())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_number_of_a_decision_is_that_of_its_file(page):
    number = int(page.name[:4])

    assert page.read_text().startswith(f"# {number}. ")


def test_a_replaced_decision_says_so_on_its_page_and_in_the_index():
    replaced = {page.name for page in PAGES if re.search(r"^Replaced by \[", page.read_text(), re.MULTILINE)}

    marked = re.findall(r"\]\((\S+\.md)\)\. Replaced by", (FOLDER / "README.md").read_text())

    assert set(marked) == replaced
