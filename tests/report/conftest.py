"""Pages in the browser of all tests, with everything that goes wrong on them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_DRAWN = "html[data-charts=drawn]"
_LONGEST_WAIT_MS = 60_000


@dataclass
class OpenPage:
    """A page in the browser, with everything that went wrong on it: lines on the console, exceptions, dialogs, and
    requests for anything but the page itself."""

    page: Any
    problems: list[str] = field(default_factory=list)

    def scrolls_sideways(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., OpenPage]]:
    """A function that opens a file or an address, and waits until its charts are drawn."""
    contexts = []

    def open_one(address: Path | str, width: int = 1200, scheme: str = "light") -> OpenPage:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        opened = OpenPage(page)
        url = address if isinstance(address, str) else address.resolve().as_uri()
        site = url if isinstance(address, str) else None

        def on_route(route: Any) -> None:
            wanted = route.request.url
            if wanted == url or (site is not None and wanted.startswith(site)):
                route.continue_()
            else:
                opened.problems.append(f"request for {wanted}")
                route.abort()

        def on_dialog(dialog: Any) -> None:
            opened.problems.append("dialog")
            dialog.dismiss()

        page.route("**/*", on_route)
        page.on("console", lambda message: opened.problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: opened.problems.append(f"exception: {error}"))
        page.on("dialog", on_dialog)
        page.goto(url)
        page.wait_for_selector(_DRAWN, state="attached", timeout=_LONGEST_WAIT_MS)
        return opened

    yield open_one
    for context in contexts:
        context.close()
