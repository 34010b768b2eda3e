"""The docs site builds strictly, has a search, draws the diagrams, and loads nothing from another host."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urljoin, urlparse

import pytest

from tests.docs.test_links import ROOT
from tests.gateway.chromium import a_page, needs_chromium

pytestmark = pytest.mark.capability("UX-3")

# What a reader looks for, and the page that has to be found by it.
SEARCHES = {
    "WaitingForGPU": "docs/troubleshooting/",
    "port-forward": "docs/quickstart/",
    "LLMInferenceService": "docs/migration/",
    "etcd": "docs/backup/",
}
# Elements whose address the browser fetches by itself; a link of `<a>` is only followed by a click.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
NOT_LOADED = {"canonical", "alternate", "next", "prev", "sitemap"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Addresses(HTMLParser):
    """The addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.classes |= set((attributes.get("class") or "").split())
        address = attributes.get(LOADING.get(tag, ""))
        if address and not set((attributes.get("rel") or "").split()) & NOT_LOADED:
            self.loaded.append(address)


def read(html: str) -> Addresses:
    parser = Addresses()
    parser.feed(html)
    return parser


def foreign(addresses: list[str]) -> list[str]:
    return [address for address in addresses if urlparse(urljoin("http://site/", address)).netloc != "site"]


def test_no_page_loads_anything_from_another_host(site):
    pages = {page: read(page.read_text()) for page in site.rglob("*.html")}

    assert len(pages) > 60
    assert {str(page): found for page, content in pages.items() if (found := foreign(content.loaded))} == {}
    # The theme's script would fetch Mermaid from a CDN for an element of this class.
    assert [page for page, content in pages.items() if "mermaid" in content.classes] == []


def test_no_style_loads_anything_from_another_host(site):
    loads = re.compile(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)")

    found = {style: loads.findall(style.read_text()) for style in [*site.rglob("*.css"), *site.rglob("*.html")]}
    assert {style: addresses for style, addresses in found.items() if addresses} == {}


def test_an_address_of_another_host_is_noticed():
    page = (
        '<link href="//fonts.example/a.css" rel="stylesheet"><link href="https://x" rel="canonical"><img src="a.png">'
    )

    assert foreign(read(page).loaded) == ["//fonts.example/a.css"]


@cache
def indexed(site: Path) -> list[dict[str, str]]:
    return json.loads((site / "search" / "search_index.json").read_text())["docs"]


@pytest.mark.parametrize(("words", "page"), SEARCHES.items(), ids=list(SEARCHES))
def test_the_search_index_has_what_readers_look_for(site, words, page):
    assert page in {
        entry["location"].partition("#")[0] for entry in indexed(site) if words in entry["text"] + entry["title"]
    }


def test_lists_for_developers_do_not_hide_answers_in_the_search(site):
    assert [entry for entry in indexed(site) if entry["location"].startswith(("docs/capabilities", "docs/adr/0"))] == []


def test_every_page_of_the_documentation_is_on_the_site(site):
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "adr").glob("[0-9]*.md")]

    missing = [page for page in pages if not (site / page.relative_to(ROOT).with_suffix("") / "index.html").exists()]
    assert missing == []


def test_every_example_is_on_the_site(site):
    examples = sorted((ROOT / "examples").rglob("*.yaml"))
    page = (site / "examples" / "index.html").read_text()

    assert [path for path in examples if not (site / path.relative_to(ROOT) / "index.html").exists()] == []
    assert [path for path in examples if f">{path.relative_to(ROOT / 'examples')}<" not in page] == []


def test_the_diagrams_are_drawn(site):
    sources = (ROOT / "docs" / "concepts.md").read_text().count("```mermaid")
    page = (site / "docs" / "concepts" / "index.html").read_text()

    assert sources == 4
    assert page.count('aria-label="Sequence: ') == sources
    assert "POST /drain" in page


@cache
def sequence():
    spec = importlib.util.spec_from_file_location("sequence", ROOT / "docs" / "site" / "sequence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_diagram_has_its_participants_messages_and_frames():
    drawn = sequence().svg(
        "sequenceDiagram\nparticipant A as a client\nparticipant B as <b>\nalt one\nA->>B: asks\nelse two\n"
        "B-->>A: answers\nend\nA->>A: thinks\nNote over A,B: both"
    )

    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert texts[:5] == ["alt: one", "asks", "else two", "answers", "thinks"]
    assert texts.count("a client") == texts.count("&lt;b&gt;") == 2
    assert drawn.count('class="frame"') == 2
    assert drawn.count("call reply") == 1


@pytest.mark.parametrize(
    "source",
    [
        "flowchart LR",
        "sequenceDiagram\nparticipant A as a\nA->>B: x",
        "sequenceDiagram\nloop x",
        "sequenceDiagram\nA-)B: x",
    ],
)
def test_a_diagram_that_cannot_be_drawn_fails_the_build(source):
    with pytest.raises(sequence().UnreadableError):
        sequence().svg(source)


class Quiet(SimpleHTTPRequestHandler):
    """A web server of files that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server of this folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@needs_chromium
async def test_a_browser_finds_a_page_by_the_search_and_asks_no_other_host(site):
    with served(site) as origin:
        async with a_page(f"{origin}/docs/concepts/") as page:
            await page.run("""
                document.querySelector('#__search').click();
                const field = document.querySelector('[data-md-component=search-query]');
                field.focus();
                field.value = 'WaitingForGPU';
                field.dispatchEvent(new Event('input', {bubbles: true}));
                field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
            """)
            await page.until(
                "[...document.querySelectorAll('.md-search-result__link')].some(a => /troubleshooting/.test(a.href))"
            )
            requested = page.requested()
            problems = page.problems()

    assert problems == []
    assert any(address.startswith(origin) for address in requested)
    assert [address for address in requested if not address.startswith((origin, "data:", "blob:"))] == []
