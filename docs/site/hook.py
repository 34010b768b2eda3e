"""Makes pages of the repository's Markdown files at their own paths, and of each file that they link to.

MkDocs takes pages from one folder; ours are in the root, in docs/, in the chart and beside the GitOps files. A relative
link then means the same file here, on a git forge and in an editor.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import sequence
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md",
    "gitops/README.md", "charts/slipway/README.md",
)  # fmt: skip
# Lists for developers: in the search they would hide the pages that answer a question.
NOT_SEARCHED = ("docs/capabilities.md", "docs/code-map.md", "docs/gpu-ledger.md", "docs/adr/", "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
ITEM = re.compile(r"\s*([-*]|\d+\.) ")
LANGUAGES = {".yaml": "yaml", ".py": "python", ".sh": "sh", ".json": "json", ".lua": "lua"}


def on_config(config: Any) -> Any:
    """Draw Mermaid's sequence diagrams while the site is built."""
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [{"name": "mermaid", "class": "mermaid", "format": sequence.fence}]
    }
    return config


def on_files(files: Files, config: Any) -> Files:
    """All pages under their paths from the root, the examples, and the linked files as pages or as they are."""
    pages = [*PAGES, *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
    site = [File(page, str(ROOT), config.site_dir, config.use_directory_urls) for page in pages]
    linked = {target for page in pages for target in _targets(page, (ROOT / page).read_text())}
    for name in sorted(linked | {_name(path) for path in (ROOT / "examples").rglob("*.yaml")}):
        path = ROOT / name
        if path.suffix in LANGUAGES:
            site.append(File.generated(config, f"{name}.md", content=_source_page(name)))
        elif path.is_file():
            site.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    site.append(File.generated(config, "examples/README.md", content=_examples()))
    site.append(File("docs/site/style.css", str(ROOT), config.site_dir, config.use_directory_urls))
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *site])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files and folders to their pages here, and write lists as Python-Markdown reads them."""
    name = page.file.src_uri
    if name.startswith(NOT_SEARCHED) and name != "docs/adr/README.md":
        page.meta["search"] = {"exclude": True}

    def target(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1]))
        if (ROOT / file).is_dir():
            index = "examples" if file.startswith("examples") else file
            return posixpath.relpath(f"{index}/README.md", posixpath.dirname(name) or ".")
        return f"{match[1]}.md" if Path(file).suffix in LANGUAGES and (ROOT / file).exists() else match[1]

    return LINK.sub(target, _lists(markdown))


def _lists(markdown: str) -> str:
    """Lists with an empty line before them and nested ones with four spaces: git forges need neither."""
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            line = re.sub(r"^ {2,3}(?=- )", "    ", line)
            if ITEM.match(line) and lines and lines[-1].strip() and not ITEM.match(lines[-1]) and lines[-1][0] != " ":
                lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _targets(page: str, text: str) -> set[str]:
    """The files of the repository, other than pages, to which a page links."""
    names = {posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in LINK.findall(text)}
    return {name for name in names if not name.endswith(".md") and (ROOT / name).is_file()}


def _source_page(name: str) -> str:
    text = (ROOT / name).read_text().rstrip()
    return f"# {Path(name).name}\n\n`{name}`\n\n````{LANGUAGES[Path(name).suffix]}\n{text}\n````\n"


def _examples() -> str:
    """The page of all examples, each with its first comment."""
    rows = []
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        comment = re.match(r"((?:#.*\n)*)", path.read_text())
        words = " ".join(line.lstrip("# ") for line in (comment[1] if comment else "").splitlines())
        name = path.relative_to(ROOT / "examples")
        rows.append(f"| [{name}]({name}) | {words} |")
    head = "# Examples\n\nManifests that run as they are: `kubectl apply -f` each of them.\n"
    return "\n".join([head, "| manifest | shows |", "|---|---|", *rows, ""])
