"""The documentation is a site whose links and anchors lead somewhere, and that loads nothing from the network."""

import logging
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from documentation.site import adapt

REPOSITORY = Path(__file__).parents[2]
_LOADED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="([^"]+)"')
_LINKED = re.compile(r'<a\b[^>]*?href="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder)))
    except Abort:
        pytest.fail("\n".join(warnings))
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    return folder


def _pages(site: Path) -> dict[Path, str]:
    return {file: file.read_text() for file in site.rglob("*.html") if file.name != "404.html"}


def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    names = {file.relative_to(REPOSITORY / "docs").with_suffix(".html") for file in (REPOSITORY / "docs").rglob("*.md")}
    assert names < {file.relative_to(site) for file in site.rglob("*.html")}
    assert {"index.html", "zh-CN.html", "contributing.html", "changelog.html"} <= {file.name for file in site.iterdir()}


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    loaded = {address for text in _pages(site).values() for address in _LOADED.findall(text)}
    assert "drawings/overview.svg" in loaded
    assert [address for address in loaded if urlsplit(address).scheme or address.startswith("//")] == []
    style = "".join(file.read_text() for file in site.rglob("*.css"))
    assert re.findall(r"@import[^;]*https?:[^;]*|url\(\s*[\"']?https?:[^)]*\)", style) == []


def test_every_link_of_the_site_leads_to_a_file_and_an_anchor(site: Path) -> None:
    pages = _pages(site)
    anchors = {file: {unquote(name) for name in re.findall(r'\bid="([^"]+)"', text)} for file, text in pages.items()}
    dead = []
    for file, text in pages.items():
        for address in {*_LOADED.findall(text), *_LINKED.findall(text)}:
            link = urlsplit(address)
            if link.scheme:
                continue
            target = (file.parent / unquote(link.path)).resolve() if link.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                dead.append(f"{file.relative_to(site)}: {address}: there is no such file")
            elif link.fragment and target in anchors and unquote(link.fragment) not in anchors[target]:
                dead.append(f"{file.relative_to(site)}: {address}: there is no such anchor")
    assert dead == []


def test_the_site_is_read_and_searched_from_the_disk(site: Path, browser: Any) -> None:
    """In a browser: nothing is asked of the network, nothing goes wrong, and no page is wider than a phone."""
    problems: list[str] = []
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.on("request", lambda request: problems.append(request.url) if "file:" not in request.url[:5] else None)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    for name in ("zh-CN.html", "how_it_works/all_reduce.html", "index.html"):
        page.goto((site / name).as_uri())
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            problems.append(f"{name} is wider than its window")
    page.set_viewport_size({"width": 1300, "height": 800})
    page.focus(".md-search__input")
    page.wait_for_function("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')")
    page.locator(".md-search__input").press_sequentially("bubble")  # the search reads what is typed, key by key
    page.wait_for_selector(".md-search-result__item a[href*='pipelines.html']", state="attached")
    context.close()
    assert problems == []


def test_every_link_out_of_the_documentation_leads_to_a_file_of_the_repository() -> None:
    """mkdocs does not see these links: they become text in the site, and work on GitHub."""
    files = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    assert len(files) > 40
    dead = [
        f"{file.relative_to(REPOSITORY)}: {target}"
        for file in files
        for target in re.findall(r"\]\(([^)\s#]+)", file.read_text())
        if not re.match(r"[a-z]+:", target) and not (file.parent / target).exists()
    ]
    assert dead == []


def test_markdown_of_github_becomes_that_of_the_site() -> None:
    text = (
        "Steps:\n1. one\n2. two\n\n| a | `x \\| y` |\n\n```\n- [a](b)\n```\n"
        "[more](../tests/ranks.py) [job](job.md#losses)\n"
    )
    expected = (
        "Steps:\n\n1. one\n2. two\n\n| a | `x | y` |\n\n```\n- [a](b)\n```\n"
        "more (`tests/ranks.py`) [job](job.md#losses)\n"
    )
    assert adapt(text, "docs/plan.md") == expected
    assert (
        adapt("[jobs](docs/job.md) ![d](docs/drawings/ring.svg)\n", "README.md")
        == "[jobs](job.md) ![d](drawings/ring.svg)\n"
    )
    assert adapt("[us](../../CONTRIBUTING.md)\n", "docs/how_to/slow.md") == "[us](../contributing.md)\n"
