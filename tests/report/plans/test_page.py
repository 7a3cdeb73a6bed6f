"""The page of a plan, in a browser: everything is there, hovering and folding work, and names of modules are only
text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.report.file_page import file_page
from meshwright.report.page import Chart, Page, Table, render, write_page
from meshwright.report.plans.page import plan_file_page, plan_page
from meshwright.report.plans.step import time_unit
from tests.report.made_up_run import HOSTILE
from tests.report.plans.made_up_plan import PIPELINE, details_of_plan, details_of_search


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def chart_of(page: Page, words: str) -> Any:
    return next(chart.figure for _, chart in page.charts if words in chart.title)


def test_the_page_of_a_search_has_every_section_and_nothing_goes_wrong(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    details = details_of_search()
    page = plan_page({**details, "cloud": points_apart(details)})
    expected = ["The best plan", "Time", "Candidates", "Memory", "Exchanges", "Model", "Cluster", "Scaling"]
    assert [title for title in expected if title not in titles(page)] == []
    write_page(page, tmp_path / "plan.html")
    opened = open_page(tmp_path / "plan.html", width=1150, scheme="light")
    everything_of_a_search_is_drawn(opened, page)
    hovering_over_a_candidate_shows_its_plan_and_the_reason(opened.page)
    modules_unfold_and_folded_blocks_say_how_many_they_are(opened.page)


@pytest.mark.soak
def test_the_page_of_a_search_on_a_phone_in_the_dark(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    page = plan_page(details_of_search())
    write_page(page, tmp_path / "plan.html")
    everything_of_a_search_is_drawn(open_page(tmp_path / "plan.html", width=390, scheme="dark"), page)


def everything_of_a_search_is_drawn(opened: Any, page: Page) -> None:
    assert opened.problems == []
    assert not opened.scrolls_sideways()
    assert opened.page.locator("h1").inner_text() == f"Plan of {HOSTILE}"
    assert opened.page.locator(".plot .main-svg").count() >= 2 * len(page.charts)
    assert opened.page.locator("b:has-text('bold')").count() == 0


def points_apart(details: dict[str, Any]) -> list[dict[str, Any]]:
    """Some points of the cloud, at places where each can be hovered over by itself."""
    chosen = next(point for point in details["cloud"] if point["group"] == "chosen")
    other = {**chosen, "group": "rejected", "plan": HOSTILE, "reason": f"too slow {HOSTILE}"}
    return [chosen, other | {"step_s": 2 * chosen["step_s"], "memory_bytes": 3 * chosen["memory_bytes"]}]


def hovering_over_a_candidate_shows_its_plan_and_the_reason(page: Any) -> None:
    plot = page.locator("figure:has(figcaption:text('All candidates')) .plot")
    plot.scroll_into_view_if_needed()
    for number, words in ((1, "the best plan"), (0, f"too slow {HOSTILE[:12]}")):
        plot.locator(".scatterlayer .trace").nth(number).locator("path.point").first.hover(force=True)
        plot.locator(f".hoverlayer text:has-text('{words}')").first.wait_for()


def modules_unfold_and_folded_blocks_say_how_many_they_are(page: Any) -> None:
    inner = page.locator(".tree .name:text-is('down')").first
    assert not inner.is_visible()
    page.locator(".tree summary:has-text('6 × Block')").click()
    assert inner.is_visible()


def test_the_parts_of_each_bar_add_up_to_the_step() -> None:
    details = details_of_search()
    bars = chart_of(plan_page(details), "parts of a step")["data"]
    unit_s, _ = time_unit(max(entry["step_s"] for entry in details["ranked"]))
    for number, entry in enumerate(details["ranked"]):
        assert sum(bar["x"][number] for bar in bars) * unit_s == pytest.approx(entry["step_s"])


def test_every_simulated_plan_and_the_capacity_are_in_the_cloud() -> None:
    details = details_of_search()
    groups = [point["group"] for point in details["cloud"]]
    assert groups.count("chosen") == 1
    assert groups.count("ranked") == len(details["ranked"]) - 1
    assert "not simulated" in groups
    assert all(point["reason"] for point in details["cloud"])
    chart = next(chart for _, chart in plan_page(details).charts if "All candidates" in chart.title)
    assert sum(len(trace["x"]) for trace in chart.figure["data"]) == len(groups)
    assert "shapes" not in chart.figure["layout"], "the capacity is far above all points"
    assert "a plan may use 73.3 GiB" in chart.note
    near = {**details, "capacity_bytes": 2 * max(point["memory_bytes"] for point in details["cloud"])}
    (line,) = chart_of(plan_page(near), "All candidates")["layout"]["shapes"]
    assert line["y0"] == line["y1"] > max(max(trace["y"]) for trace in chart.figure["data"])


def test_scaling_has_one_point_for_each_number_of_devices_and_the_ideal_line() -> None:
    details = details_of_search()
    assert [entry["devices"] for entry in details["scaling"]] == [1, 2, 4]
    ideal, predicted = chart_of(plan_page(details), "fewer devices")["data"]
    assert ideal["y"] == pytest.approx([predicted["y"][0] * devices for devices in (1, 2, 4)])


def test_a_pipeline_has_a_timeline_whose_rows_are_busy_or_waiting_and_memory_of_each_rank() -> None:
    details = details_of_plan(**PIPELINE)
    page = plan_page(details)
    assert "Candidates" not in titles(page)
    spans = chart_of(page, "Timeline")["data"]
    assert {trace["name"] for trace in spans} == {"forward", "backward", "waiting (bubble)"}
    span_s = details["timeline"]["span_s"]
    unit_s, _ = time_unit(span_s)
    for rank in range(2):
        filled = [x for trace in spans for x, y in zip(trace["x"], trace["y"], strict=True) if y == f"rank {rank}"]
        assert sum(filled) * unit_s == pytest.approx(span_s, rel=1e-3)
    assert len(details["memory"]["ranks"]) == 2
    assert {item["collective"] for item in details["exchanges"]} == {"all_reduce", "point_to_point"}
    stages = {words for kind, words in labels(details["modules"]) if kind == "stage"}
    assert stages == {"stage 0", "stage 1"}
    assert "sent to stage 1" in exchanges(details["modules"])
    assert render(page)


def labels(node: dict[str, Any]) -> list[tuple[str, str]]:
    inside = [label for child in node.get("children", ()) for label in labels(child)]
    return [*map(tuple, node.get("labels", ())), *inside]


def exchanges(node: dict[str, Any]) -> list[str]:
    return [*node.get("exchanges", ()), *(words for child in node.get("children", ()) for words in exchanges(child))]


def test_split_layers_have_their_kind_and_their_exchange() -> None:
    details = details_of_plan(axes={"tensor": 2, "shard": 2})
    split = {words for kind, words in labels(details["modules"]) if kind == "split"}
    assert {"columns split over 2 ranks", "rows split over 2 ranks"} <= split
    assert ("sharded", "sharded over 2 ranks") in labels(details["modules"])
    assert "all-reduce after, over 2 tensor ranks" in exchanges(details["modules"])
    assert any("weights are gathered" in words for words in exchanges(details["modules"]))


def test_details_are_json_from_which_the_same_page_is_made(tmp_path: Path) -> None:
    details = details_of_search()
    (tmp_path / "plan.json").write_text(json.dumps(details, allow_nan=False))
    again, page = file_page(tmp_path / "plan.json"), plan_page(details)
    assert titles(again) == titles(page)
    assert [chart.figure for _, chart in again.charts] == json.loads(
        json.dumps([chart.figure for _, chart in page.charts])
    )


def test_plain_plans_are_rows_of_the_page_and_its_first_line_has_the_figures() -> None:
    details = details_of_search()
    first = plan_page(details).sections[0]
    assert first.explanation.startswith(details["headline"])
    ranked = [entry["plan"] for entry in details["ranked"]]
    plain = [entry for entry in details["plain"] if entry["plan"] not in ranked]
    assert plain
    tables = [part for section in plan_page(details).sections for part in section.parts if isinstance(part, Table)]
    cells = [str(row[1]) for table in tables for row in table.rows if len(row) > 1]
    assert {f"{entry['name']}: {entry['summary']}" for entry in plain} <= set(cells)


def test_what_plan_prints_as_json_gives_a_page_without_the_details(tmp_path: Path) -> None:
    printed = ("choice", "best", "ranked", "explanation", "rejected", "candidates")
    short = {name: details_of_search()[name] for name in printed} | {"seconds": 1.0}
    (tmp_path / "plan.json").write_text(f"a line before it\n{json.dumps(short)}\n")
    page = file_page(tmp_path / "plan.json")
    assert "Time" in titles(page)
    assert "Memory" not in titles(page)
    assert render(page)


def test_a_plan_file_alone_has_a_page_without_charts(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    Plan.model_validate(PIPELINE).save(tmp_path / "plan.yaml")
    page = file_page(tmp_path / "plan.yaml")
    assert page.charts == []
    write_page(page, tmp_path / "plan.html")
    opened = open_page(tmp_path / "plan.html", width=390)
    assert opened.problems == []
    rows = opened.page.locator("tr:has(td:text-is('plan'))").all_inner_texts()
    assert sorted(row.split()[1] for row in rows) == ["cuts", "microbatches", "pipeline", "replicate"]
    assert not any(isinstance(part, Chart) for section in page.sections for part in section.parts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("axes: {replicat: 2}", "this is no plan"),
        ('{"rows": [{"a": 1}], "summary": {}}', "have the fields a"),
        ('{"best": {}, "ranked": []}', "the JSON is not complete"),
        ('{"loss": 1}', "neither a plan nor a proof, audit or benchmark"),
        ("\x00\x01", "this is no plan"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(InputError, match=words):
        file_page(tmp_path / "file.json")


def test_values_of_a_plan_file_are_written_as_in_the_file_and_what_it_sets_comes_first() -> None:
    page = plan_file_page(Plan.model_validate({"compute": {"cuda_graphs": True}}), "small")
    (table,) = (part for part in page.sections[0].parts if isinstance(part, Table))
    rows = {row[1]: row[2:4] for row in table.rows}
    assert table.rows[0][1] == "cuda_graphs"
    assert (rows["cuda_graphs"], rows["fused_optimizer"], rows["threads"]) == (
        ("true", "plan"),
        ("false", "default"),
        ("null", "default"),
    )
