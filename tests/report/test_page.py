"""The frame of pages: escaping, the size of numbers, one file."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from meshwright.report.charts import axis, bars, colour, figure, line, shortened, thinned
from meshwright.report.page import (
    Cell,
    Chart,
    Drawing,
    KeyFigures,
    Lines,
    Page,
    Phrase,
    Section,
    Table,
    TableCell,
    Tree,
    TreeNode,
    escaped_figure,
    render,
    script_json,
    write_page,
)
from tests.report.made_up_run import HOSTILE


def page_of(*parts: Any, title: str = "A page") -> Page:
    return Page(title, "About it", [Section("First part", "What it is.", parts)])


def test_a_spike_survives_thinning() -> None:
    values = [math.sin(number / 100) for number in range(100_000)]
    values[54_321] = 17.0
    x, y = thinned(list(range(100_000)), values, 1_000)
    assert len(x) <= 1_000
    assert max(y) == 17.0, "the largest value"  # type: ignore[type-var]
    assert x[y.index(17.0)] == 54_321
    assert (x[0], x[-1]) == (0, 99_999)
    assert x == sorted(x)


def test_missing_values_are_thinned_too() -> None:
    x, y = thinned(list(range(1_000)), [None] * 1_000, 100)
    assert len(x) <= 100
    assert set(y) == {None}


def test_texts_in_a_figure_are_escaped_except_templates_and_markup() -> None:
    chart = figure([line(HOSTILE, [HOSTILE], [1.0])], axis(HOSTILE), axis("y"), annotations=[{"text": Markup("<b>")}])
    escaped = escaped_figure(chart)
    assert escaped["data"][0]["name"] == HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert "<" not in escaped["data"][0]["x"][0]
    assert "<" not in escaped["layout"]["xaxis"]["title"]["text"]
    assert escaped["layout"]["annotations"][0]["text"] == "<b>"
    assert escaped["data"][0]["hovertemplate"].endswith("<extra></extra>")


def test_json_in_a_script_cannot_end_it() -> None:
    text = script_json({"name": HOSTILE, "line": "\u2028"})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"name": HOSTILE, "line": "\u2028"}


def test_numbers_that_json_cannot_express_are_missing() -> None:
    assert escaped_figure({"y": [math.nan, math.inf, 1 / 3, 2.0]}) == {"y": [None, None, 0.333333, 2]}


def test_a_page_without_charts_has_no_chart_library() -> None:
    small = render(page_of(KeyFigures([("loss", "1")]), Table(["a"], [[1]])))
    assert len(small) < 30_000
    with_chart = render(page_of(Chart("c", figure([line("l", [0], [1])], axis("x"), axis("y")))))
    assert 1_000_000 < len(with_chart) < 2_500_000


def test_names_of_parts_are_unique_and_safe() -> None:
    chart = Chart(HOSTILE, figure([line("l", [0], [1])], axis("x"), axis("y")))
    names = [name for name, _ in page_of(chart, chart, Table(["a"], [])).parts()]
    assert len(set(names)) == 3
    assert all(re.fullmatch("[a-z0-9-]+", name) for name in names)


def test_a_long_label_keeps_both_ends() -> None:
    assert shortened("layers.0.attention.query.weight", 11) == "layer…eight"


@pytest.fixture
def full_page(tmp_path: Path) -> Path:
    """A page with every kind of part, and hostile names in all of them."""
    x = list(range(300))
    charts = [
        Chart(
            HOSTILE,
            figure(
                [line(HOSTILE, x, [math.sin(a / 9) for a in x], line_colour=colour(0))],
                axis("step"),
                axis("loss", "nats"),
            ),
        ),
        Chart(
            "Bars",
            figure([bars(HOSTILE, [HOSTILE, "b"], [1, 2], "%{x}: %{y}", colour(1))], axis("rank"), axis("time", "ms")),
        ),
    ]
    rows: list[list[TableCell]] = [
        [HOSTILE if number == 7 else f"layer.{number}", number * 1.5, Cell("ok", number, "good")]
        for number in range(90)
    ]
    svg = Markup('<svg viewBox="0 0 100 20"><text x="0" y="15">{}</text></svg>').format(HOSTILE)
    drawing = Drawing(svg, HOSTILE, width_px=300)
    leaf = TreeNode([Phrase(HOSTILE, "name"), Phrase("split over 2 ranks", "label", colour(1))])
    inner = TreeNode([Phrase("block", "name")], [leaf], is_open=False)
    tree = Tree(TreeNode([Phrase("model", "name")], [inner]), f"The modules of {HOSTILE}")
    page = page_of(
        *charts,
        Table(["name", "value", "state"], rows),
        drawing,
        tree,
        Lines([HOSTILE]),
        KeyFigures([(HOSTILE, HOSTILE)]),
        title=HOSTILE,
    )
    file = tmp_path / "page.html"
    write_page(page, file)
    return file


def test_every_part_works_in_a_browser(full_page: Path, open_page: Callable[..., Any]) -> None:
    opened = open_page(full_page)
    page = opened.page
    assert page.title() == HOSTILE
    assert page.locator(".plot .main-svg").count() >= 2, "both charts are drawn"
    assert page.locator("img, main b").count() == 0, "no name became an element"
    label = page.locator(".plot").nth(1).locator(".xtick text").first.text_content()
    assert label.replace("\xa0", " ") == HOSTILE, "plotly shows the name of a category as text"
    page.locator(".plot .nsewdrag").first.hover(position={"x": 300, "y": 100})
    hover = page.wait_for_selector(".hoverlayer .hovertext").text_content()
    assert HOSTILE in hover.replace("\xa0", " "), "and in the text at the pointer"
    # The table shows 50 rows, all of them, those that match, and sorts.
    table = page.locator(".part.table")
    assert table.locator("tbody tr").count() == 50
    table.get_by_text("Show all 90").click()
    assert table.locator("tbody tr").count() == 90
    table.locator("input").fill("onerror")
    assert table.locator("tbody tr").count() == 1
    assert table.locator("tbody td").first.inner_text() == HOSTILE
    table.locator("input").fill("")
    table.get_by_role("button", name="value").click()
    table.get_by_role("button", name="value").click()
    assert table.locator("tbody td").first.inner_text() == "layer.89"
    # The theme is the system's until the button changes it, and charts follow.
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    before = page.evaluate(ink)
    page.locator("#theme").click()
    page.wait_for_selector("html[data-theme=dark][data-charts=drawn]", state="attached")
    assert page.evaluate(ink) != before
    assert opened.problems == []


@pytest.mark.soak
def test_a_screen_reader_sees_a_tree_and_the_keyboard_folds_it(full_page: Path, open_page: Callable[..., Any]) -> None:
    opened = open_page(full_page)
    tree = opened.page.locator(".part.tree")
    assert tree.get_by_role("list", name=f"The modules of {HOSTILE}").count() == 1
    assert tree.get_by_text("split over 2 ranks").is_hidden(), "the module around it is folded"
    tree.locator("summary").nth(1).focus()
    opened.page.keyboard.press("Enter")
    assert tree.get_by_role("listitem").count() == 3
    assert f"{HOSTILE} split over 2 ranks" in tree.get_by_role("listitem").last.inner_text().replace("\xa0", " ")
    tree.get_by_role("button", name="Fold all", exact=True).press("Enter")
    assert tree.get_by_role("listitem").count() == 2, "the modules of the first level stay visible"
    tree.get_by_role("button", name="Unfold all").press("Enter")
    assert tree.get_by_text("split over 2 ranks").is_visible()
    assert opened.problems == []


@pytest.mark.soak
def test_a_page_fits_a_phone_and_prints_light(full_page: Path, open_page: Callable[..., Any]) -> None:
    opened = open_page(full_page, width=390, scheme="dark")
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert not opened.scrolls_sideways()
    opened.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert opened.problems == []
