"""The frame of all pages: a page is a title and sections, a section is an explanation and parts, and a part is a chart,
a table, a drawing, a tree or a list of key figures. `render` turns a page into one HTML file that opens from disk and
requests nothing from a network.

Everything that comes from a job or a run is escaped: text in HTML by jinja2, data in script elements by `script_json`,
and text in charts, where plotly would interpret a few HTML tags, by `escaped_figure`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.files.storage import write_atomically
from meshwright.report.plotly_script import compressed_plotly
from meshwright.version import VERSION

# Texts with these keys in a figure are templates that only this package writes. plotly inserts escaped values in them.
_TEMPLATE_KEYS = ("hovertemplate", "texttemplate")
_SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True)
class Chart:
    """A figure of plotly: a dict with `data` and `layout`, of plain values. A colour is written as in the style sheet,
    such as `var(--series-0)`, so that it follows the theme. Texts are escaped, except `Markup` and hover templates.
    `title` is what the chart shows, with its units on the axes; `note` is shown below it."""

    title: str
    figure: Mapping[str, Any]
    height_px: int = 340
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is shown as `text` and sorted by `value`. `tone` is `good`, `bad`, `muted` or empty."""

    text: str
    value: float | None = None
    tone: str = ""


TableCell = str | float | Cell | None


@dataclass(frozen=True)
class Table:
    """A table whose columns can be sorted, and whose rows can be filtered by a text if there are many. Numbers are
    aligned and shown with four digits; a `Cell` has a text of its own."""

    header: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Drawing:
    """An SVG element that this package has made, with `description` for people who do not see it. `width_px` is the
    width at which it is drawn where there is room; it shrinks to `minimum_px`; narrower screens scroll inside it."""

    svg: Markup
    description: str
    title: str = ""
    width_px: int = 1100
    minimum_px: int = 0
    note: str = ""


@dataclass(frozen=True)
class Phrase:
    """A few words of a tree's line. `kind` is a class of the style sheet: `name`, `times`, `muted`, `label`, whose edge
    has `colour`, or `exchange`."""

    text: str
    kind: str
    colour: str = ""


@dataclass(frozen=True)
class TreeNode:
    """A line of a tree with the lines below it, which are hidden at first unless `is_open`."""

    phrases: Sequence[Phrase]
    children: Sequence["TreeNode"] = ()
    is_open: bool = True


@dataclass(frozen=True)
class Tree:
    """Nested lists that a pointer or a keyboard folds and unfolds. `description` says to a screen reader what it is."""

    root: TreeNode
    description: str
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class KeyFigures:
    """A few figures with their names, such as `("samples per second", "1,234")`."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Lines:
    """Lines of a log, in a box that scrolls."""

    lines: Sequence[str]
    title: str = ""


Part = Chart | Table | Drawing | Tree | KeyFigures | Lines


@dataclass(frozen=True)
class Section:
    """A part of a page with a title, an explanation in plain words of how to read it, and what it shows."""

    title: str
    explanation: str
    parts: Sequence[Part]

    @property
    def name(self) -> str:
        return _slug(self.title)


@dataclass(frozen=True)
class Page:
    """What `render` turns into HTML. `badge` is a short state such as `finished`."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    badge: str = ""
    footer: str = f"Written by meshwright {VERSION}."

    @property
    def charts(self) -> list[tuple[str, Chart]]:
        """Every chart with its name, which is unique on the page."""
        return [(name, part) for name, part in self.parts() if isinstance(part, Chart)]

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yields every part with a name that stays the same when the page of the same run is rendered again."""
        counts: dict[str, int] = {}
        for section in self.sections:
            for part in section.parts:
                name = f"{section.name}-{_slug(getattr(part, 'title', '')) or type(part).__name__.lower()}"
                counts[name] = counts.get(name, 0) + 1
                yield name if counts[name] == 1 else f"{name}-{counts[name]}", part


def render(page: Page) -> str:
    """Returns the page as one HTML document."""
    bundle = compressed_plotly() if page.charts else ""
    return _template("page.html.j2").render(page=page, body=Markup(render_body(page)), plotly=bundle, script="")


def render_with_script(page: Page, script: str) -> str:
    """Returns the page for a server on the loopback interface, with a script that may send requests to this server:
    `live.js` asks for a new body every few seconds, and `figures.js` sends pictures of the charts."""
    body = Markup(render_body(page))
    return _template("page.html.j2").render(page=page, body=body, plotly=compressed_plotly(), script=script)


def render_body(page: Page) -> str:
    """Returns what is inside the page's `main` element, without the scripts."""
    names = iter(page.parts())
    sections = [(section, [next(names) for _ in section.parts]) for section in page.sections]
    return _template("body.html.j2").render(page=page, sections=sections)


def write_page(page: Page, path: Path) -> None:
    """Writes the page to a file, which readers see either as it was or whole."""
    write_atomically(path, render(page))


def escaped_figure(value: Any, key: str = "") -> Any:
    """Returns a figure in which plotly interprets no text as HTML, floats have six digits, and numbers that JSON cannot
    express are None."""
    if isinstance(value, Mapping):
        return {str(name): escaped_figure(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped_figure(item, key) for item in value]
    if isinstance(value, str):
        if isinstance(value, Markup) or key in _TEMPLATE_KEYS:
            return str(value)
        return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _rounded(value) if isinstance(value, float) else value


def script_json(value: Any) -> Markup:
    """Returns the value as JSON that may be written into a script element: it cannot end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _figure_json(chart: Chart) -> Markup:
    return script_json(escaped_figure(chart.figure))


def _table_json(table: Table) -> Markup:
    return script_json({"header": list(table.header), "rows": [[_cell(cell) for cell in row] for row in table.rows]})


def _cell(cell: TableCell) -> Any:
    """A string or a number as it is; a `Cell` as [text, value, tone]."""
    if isinstance(cell, Cell):
        return [cell.text, _rounded(cell.value) if cell.value is not None else None, cell.tone]
    return _rounded(cell) if isinstance(cell, float) else cell


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only processes that write pages import it

    environment = Environment(
        loader=PackageLoader("meshwright.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure_json=_figure_json, table_json=_table_json, script_json=script_json)
    environment.tests.update(
        {
            "chart": lambda part: isinstance(part, Chart),
            "table": lambda part: isinstance(part, Table),
            "drawing": lambda part: isinstance(part, Drawing),
            "tree": lambda part: isinstance(part, Tree),
            "key_figures": lambda part: isinstance(part, KeyFigures),
            "lines": lambda part: isinstance(part, Lines),
        }
    )
    return environment.get_template(name)
