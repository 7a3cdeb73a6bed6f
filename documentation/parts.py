"""Parts of pages that are made from data. They stand between `<!-- made by MODULE -->` and `<!-- end -->`."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from validation.fuzz.counts import fuzz_part
from validation.speed.sweep.table import sweep_part

PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "performance.md": {"validation.speed.sweep": sweep_part},
    "prove.md": {"validation.fuzz": fuzz_part},
}


def pages_with_parts(docs: Path) -> dict[str, str]:
    """The text of each page that has such parts, with the parts as they are made now, by its path in `docs/`."""
    return {page: with_parts((docs / page).read_text(), parts) for page, parts in PARTS.items()}


def with_parts(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """The text with these parts. Raises a `ValueError` if it has no place for one."""
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- made by {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        places = list(pattern.finditer(text))
        if len(places) != 1:
            raise ValueError(f"the page has {len(places)} places for {name}, not one")
        place = places[0]
        text = f"{text[: place.start()]}{place[1]}\n{make()}\n\n{place[2]}{text[place.end() :]}"
    return text


def stale_parts(docs: Path) -> list[str]:
    """The pages whose parts differ from what is made now."""
    return sorted(page for page, text in pages_with_parts(docs).items() if (docs / page).read_text() != text)
