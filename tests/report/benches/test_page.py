"""The pages of benchmarks show what was measured, and survive what was not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.bench.loading import LoadingRow
from meshwright.bench.strategies.rows import StrategyRow
from meshwright.report.benches.page import bench_page
from meshwright.report.file_page import file_page
from meshwright.report.page import Chart, Page, Table, render, write_page
from tests.report.made_up_run import HOSTILE

NOT_MEASURED: dict[str, Any] = {
    **dict.fromkeys(("speedup", "efficiency", "exchanged_bytes", "shares", "peak_memory_bytes", "predicted_speedup")),
    **dict.fromkeys(("predicted_memory_bytes", "spread", "loss", "loss_difference", "loss_tolerance", "loss_agrees")),
    **dict.fromkeys(("samples_per_s", "predicted_step_s", "measured_step_s")),
}


def strategy(name: str, ranks: int, step_s: float | None, **fields: Any) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    if step_s is not None:
        measured = {
            "samples_per_s": 64 / step_s,
            "measured_step_s": step_s,
            "speedup": 0.1 / step_s,
            "efficiency": 0.1 / step_s / ranks,
            "spread": 0.2,
            "predicted_step_s": 1.1 * step_s,
            "shares": {"computing": 0.7, "communicating": 0.1, "waiting": 0.2, "bubble": 0.0},
            "exchanged_bytes": 1e6,
        }
    row = StrategyRow(name, HOSTILE, ranks, "fp32", rounds=3, **{**NOT_MEASURED, **measured, **fields})
    return vars(row)


def strategies() -> dict[str, Any]:
    rows = [
        strategy("single device", 1, 0.1, loss=2.0, loss_agrees=True),
        strategy("replicate native", 2, 0.06, loss=2.5, loss_agrees=False),
        strategy("replicate native", 4, 0.03),
        strategy(HOSTILE, 4, None),
        *(strategy(f"strategy {number}", 4, 0.05 + number / 100) for number in range(12)),
    ]
    skipped = [{"strategy": "tensor", "ranks": 2, "precision": "fp32", "reason": HOSTILE}]
    summary = {"prediction_error_median": 0.1, "automatic_over_manual": {"2": 1.2}, "fastest": None}
    return {
        "kind": "strategies",
        "job": "mnist",
        "rows": rows,
        "summary": summary,
        "skipped": skipped,
        "global_batch": 64,
    }


def loading() -> dict[str, Any]:
    rows = [
        vars(LoadingRow("pictures", 0, 7, 1000.0, 800.0, 1.25, (1.2, 1.3))),
        vars(LoadingRow("array", 2, 7, 1e6, None, None, None)),
    ]
    return {"rows": rows, "summary": {}}


def charts(page: Page) -> list[Chart]:
    return [chart for _, chart in page.charts]


@pytest.mark.soak
def test_the_page_of_strategies_is_drawn_and_sorted(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(strategies()))
    write_page(file_page(tmp_path / "bench.json"), tmp_path / "bench.html")
    opened = open_page(tmp_path / "bench.html", width=390, scheme="dark")
    assert opened.problems == []
    assert not opened.scrolls_sideways()
    table = opened.page.locator("#all-strategies .table").first
    table.locator("th button:has-text('samples/s')").click()
    assert "strategy 11" in table.locator("tbody tr").first.inner_text()
    assert opened.page.locator("td.bad").all_inner_texts() == ["2.5, differs"]


def test_bars_have_their_spread_and_scaling_its_ideal_line() -> None:
    speed, scaling, shares, errors = charts(bench_page(strategies()))
    (bar,) = speed.figure["data"]
    assert len(bar["x"]) == 15, "a strategy that was not measured has no bar"
    assert bar["error_x"]["array"][-1] == pytest.approx(bar["x"][-1] * 0.1)
    ideal, fastest = scaling.figure["data"][:2]
    assert ideal["y"] == [1, 2, 4]
    assert fastest["name"] == "replicate native"
    assert fastest["x"] == [1, 2, 4]
    assert fastest["y"] == pytest.approx([1.0, 0.1 / 0.06, 0.1 / 0.03])
    assert [trace["name"] for trace in shares.figure["data"]] == ["computing", "communicating", "waiting"]
    exact, points = errors.figure["data"]
    assert points["customdata"][0][1] == pytest.approx(0.1)
    assert exact["x"] == exact["y"]


def test_strategies_that_are_only_predicted_are_shown_as_such() -> None:
    rows = [
        strategy("replicate", ranks, None, predicted_step_s=0.1 / ranks, predicted_speedup=ranks) for ranks in (1, 8)
    ]
    page = bench_page({"kind": "strategies", "rows": rows, "summary": {}})
    assert [chart.title for chart in charts(page)] == [
        "Predicted steps per second",
        "Predicted speed-up over one device",
    ]
    assert "predicted" in page.sections[0].explanation
    table = page.sections[-1].parts[0]
    assert isinstance(table, Table)
    assert table.rows[0][3] is None


def test_a_precision_in_which_one_device_was_not_run_is_named() -> None:
    report = strategies()
    assert "compared with it in fp32" not in charts(bench_page(report))[1].note
    report["rows"].append({**strategy("auto", 4, 0.01), "precision": "bf16"})
    assert "One device was not run in bf16: those strategies are compared with it in fp32" in (
        charts(bench_page(report))[1].note
    )


def test_loading_has_a_page() -> None:
    assert_shown(bench_page(loading()))


def assert_shown(page: Page) -> None:
    """The page has charts whose axes say what they are, and shows hostile names as text."""
    assert charts(page)
    assert "<img src=x" not in render(page)
    for chart in charts(page):
        for name in ("xaxis", "yaxis"):
            assert chart.figure["layout"][name]["title"]["text"] or chart.figure["layout"][name]["type"] == "category"


def test_a_benchmark_without_rows_is_not_taken_for_another() -> None:
    page = bench_page({"kind": "strategies", "rows": [], "summary": {}, "skipped": strategies()["skipped"]})
    assert [section.title for section in page.sections] == ["Result", "All strategies"]
