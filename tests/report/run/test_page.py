"""The page of a run, of whatever its folder holds."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.report.page import KeyFigures, Page, Table, render
from meshwright.report.run.page import run_page
from meshwright.train.output.activity_times import times_file
from meshwright.train.output.folder import RunFolder
from tests.report.made_up_run import HOSTILE, SLOW_RANK, make_run

LARGEST_PAGE_BYTES = 5_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made-up-0001")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def test_a_finished_run_has_every_section(run: Path) -> None:
    page = run_page(run)
    assert page.badge == "finished"
    assert titles(page) == [
        *("Summary", "Loss and metrics", "Throughput", "Where the time goes", "Stragglers", "Memory"),
        *("Predicted and measured", "Plan", "Cluster", "History", "Job and plan"),
    ]


def test_the_slow_rank_is_named(run: Path) -> None:
    section = next(section for section in run_page(run).sections if section.title == "Stragglers")
    assert section.explanation.startswith(f"Rank {SLOW_RANK} computes at least 10% longer")
    assert f" With loading, rank {SLOW_RANK} is 1.2 times slower" in section.explanation


def test_a_rank_that_loads_slowly_is_named(copy: Path) -> None:
    file = times_file(RunFolder(copy).times, 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if "seconds" in line and "steps" in line:
            line["seconds"]["data"] = 3 * sum(line["seconds"].values())
    file.write_text("\n".join(map(json.dumps, lines)))
    section = next(section for section in run_page(copy).sections if section.title == "Stragglers")
    assert re.search(
        r" With loading, rank 0 is \d\.\d times slower .*: 75% of its step is loading data\.", section.explanation
    )


def test_the_error_of_the_prediction_is_shown(run: Path) -> None:
    section = next(section for section in run_page(run).sections if section.title == "Predicted and measured")
    table = section.parts[0]
    assert isinstance(table, Table)
    assert [getattr(row[3], "text", row[3]) for row in table.rows] == ["-4.8%", "+0.0%"]


def test_a_restart_and_checkpoints_are_marked(run: Path) -> None:
    charts = dict(run_page(run).charts)
    traces = charts["throughput-throughput"].figure["data"]
    assert [trace["name"] for trace in traces] == ["samples per second", "checkpoint saved", "restart"]


@pytest.mark.parametrize("missing", ["times", "page.json", "metrics.jsonl", "result.json", "plan.yaml", "logs"])
def test_a_run_that_has_not_recorded_something_has_a_page(copy: Path, missing: str) -> None:
    path = copy / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "Job and plan" in render(run_page(copy, live=True))


@pytest.mark.parametrize("content", ["{", "[]", '{"cluster": 3, "modules": [], "prediction": {"breakdown": 1}}', "\0"])
def test_a_damaged_page_json_is_said_and_not_fatal(copy: Path, content: str) -> None:
    RunFolder(copy).page.write_text(content)
    assert "Cluster" in titles(run_page(copy))


def test_a_run_that_diverged_says_so_and_shows_the_steps_before(copy: Path) -> None:
    loss = 1e12
    with RunFolder(copy).metrics.open("a") as file:
        for step in range(210, 250, 10):
            entry = {"kind": "train", "step": step, "epoch": 0, "loss": loss if step == 210 else None, "time": 1.8e9}
            file.write(json.dumps(entry) + "\n")
        for step in (220, 221, 222, 230):
            entry = {"kind": "skipped", "step": step, "epoch": 0, "loss": None, "skipped_steps": 1, "time": 1.8e9}
            file.write(json.dumps(entry) + "\n")
    RunFolder(copy).result.unlink()
    page = run_page(copy)
    assert isinstance(page.sections[0].parts[0], KeyFigures)
    assert ("training loss, last step", "NaN or infinite") in page.sections[0].parts[0].rows
    chart = dict(page.charts)["loss-and-metrics-loss"]
    assert chart.figure["layout"]["yaxis"]["type"] == "log"
    assert chart.figure["data"][-1]["x"] == [220, 230, 240]
    assert "is NaN or infinite, the first of them step 220" in chart.note
    history = next(section for section in page.sections if section.title == "History").parts[0]
    assert isinstance(history, Table)
    skipped = [(row[1], row[3]) for row in history.rows if "skipped" in str(row[3])]
    assert skipped == [(220, "3 steps skipped: loss NaN or infinite"), (230, "step skipped: loss NaN or infinite")]


def test_half_a_line_is_left_out(copy: Path) -> None:
    with (copy / "times" / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 210, "st')
    with RunFolder(copy).metrics.open("a") as file:
        file.write('{"kind": "train", "step": "x", "time": 1}\n{"kind"')
    assert titles(run_page(copy)) == titles(run_page(copy))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run folder"):
        run_page(tmp_path)
    with pytest.raises(InputError, match="there is no such folder"):
        run_page(tmp_path / "missing")


@pytest.mark.soak
def test_hostile_names_stay_text_in_a_browser(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    page = run_page(make_run(tmp_path / "run", hostile=True), live=True)
    file = tmp_path / "page.html"
    file.write_text(render(page))
    opened = open_page(file, width=390)
    assert opened.page.locator("img, main b").count() == 0
    assert HOSTILE in opened.page.locator(".subtitle").inner_text()
    assert HOSTILE in opened.page.locator("main").inner_text()
    assert opened.page.locator(".plot .main-svg").count() >= len(page.charts)
    assert not opened.scrolls_sideways()
    assert opened.problems == []


@pytest.mark.soak
def test_the_page_of_a_long_run_on_many_ranks_is_small(tmp_path: Path) -> None:
    page = run_page(make_run(tmp_path / "run", ranks=64, steps=100_000))
    assert len(render(page).encode()) <= LARGEST_PAGE_BYTES


def test_charts_of_a_long_run_are_thinned(tmp_path: Path) -> None:
    """Half of the ranks and steps of the test above: what a page holds does not grow with them."""
    page = run_page(make_run(tmp_path / "run", ranks=8, steps=50_000))
    for name, chart in page.charts:
        assert all(len(trace["x"]) <= 2_000 for trace in chart.figure["data"]), name
    assert len(json.dumps([chart.figure for _, chart in page.charts])) < 1_500_000


@pytest.mark.parametrize("layer", ["blocks.0.mlp.experts", HOSTILE])
def test_loads_of_experts_are_shown_and_a_skewed_router_is_named(copy: Path, layer: str) -> None:
    folder = RunFolder(copy)
    folder.plan.write_text(Plan(axes=Axes(replicate=4, expert=2)).to_yaml())
    result = json.loads(folder.result.read_text())
    tokens = {"blocks.1.mlp.experts": [25, 25, 25, 25], layer: [0, 2, 1, 97], "damaged": [1, "two"]}
    folder.result.write_text(json.dumps({**result, "expert_tokens": tokens}))
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    folder.metrics.write_text("".join(json.dumps({**entry, "expert_load": 3.5}) + "\n" for entry in lines))
    page = run_page(copy)
    section = next(section for section in page.sections if section.title == "Experts")
    assert "expert 3 of 4 gets 3.9 times its even share" in section.explanation
    assert "rank 1 of the 2 ranks of the expert axis computes 2.0 times the mean" in section.explanation
    table = next(part for part in section.parts if isinstance(part, Table))
    assert [(row[1], row[3], row[4]) for row in table.rows] == [(0, 0, 0), (3, 1, 1)]
    assert "<img src=x" not in render(page)


def test_the_shares_of_a_run_are_shown_with_their_changes(copy: Path) -> None:
    assert "Shares" not in titles(run_page(copy))
    folder = RunFolder(copy)
    folder.plan.write_text(Plan.model_validate({"axes": {"replicate": 4}, "shares": "adaptive"}).to_yaml())
    lines = [{"step": 5}, {"step": 10, "first": 17, "samples": [20, 20, 16, 8], "speeds": [10.0, 10.0, 8.0, 4.0]}]
    folder.shares.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    section = next(section for section in run_page(copy).sections if section.title == "Shares")
    assert section.explanation.startswith("Shares began even and changed 1 time.")
    (table,) = [part for part in section.parts if isinstance(part, Table)]
    assert table.rows == [[10, 18, "20, 20, 16, 8", "10, 10, 8, 4"]]
    assert "Shares over time" in render(run_page(copy))
