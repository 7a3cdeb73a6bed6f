"""The pages of what `python -m validation.bench` writes, and its command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.errors import InputError
from meshwright.report.page import Table
from tests.report.benches.test_page import assert_shown, charts
from tests.report.made_up_run import HOSTILE
from validation.bench.collectives.compare import CollectiveRow
from validation.bench.commands import bench
from validation.bench.faults.run import Kill
from validation.bench.pages import bench_page
from validation.bench.peers.rows import PeerRow


def collectives() -> dict[str, Any]:
    rows = [
        vars(CollectiveRow(name, 2, size, 1e-5 + size / 1e9, (9e-6, 1e-4 + size / 1e9), 1e9, ratio, predicted))
        for name, ratio, predicted in (("native", 1.0, 1e-4), ("memory_limit", None, None))
        for size in (1024, 2**20)
    ]
    return {"rows": rows, "summary": {}, "ranks": 2, "skipped": [{"algorithm": "openmpi", "reason": "not installed"}]}


def peers() -> dict[str, Any]:
    rows = [
        vars(PeerRow("ddp", "defaults", HOSTILE, 900.0, 1.0, (1.0, 1.0), 5, 2.0, 0.0, True)),
        vars(PeerRow("fsdp2", "best", "compiled", 1e6, 0.7, (0.6, 0.8), 5, None, None, False)),
    ]
    return {"rows": rows, "summary": {}, "left_out": {"deepspeed": "not installed"}, "ranks": 2}


def faults() -> dict[str, Any]:
    parts = {"notice": 0.05, "stop": 0.1, "step": 1.0}
    kills = [Kill(1, 7, "save", "save", 0, 5, 5, 1.15, parts), Kill(0, -1, HOSTILE, "start-up", 1, 5, None, None, None)]
    summary = {"kills": 2, "restarts": 2, "recovery_s": 1.15, "lost_steps": 0, "bitwise_equal": True}
    rows = [{"spare": True, **vars(kill)} for kill in kills]
    return {"kind": "faults", "rows": rows, "summary": {"with spare": {**summary, "leftovers": [HOSTILE]}}}


@pytest.mark.parametrize("report", [collectives, peers, faults])
def test_each_measurement_has_a_page(report: Callable[[], dict[str, Any]]) -> None:
    assert_shown(bench_page(report()))


def test_the_time_after_each_kill_is_drawn_by_its_parts() -> None:
    page = bench_page(faults())
    (chart,) = charts(page)
    assert [(trace["name"], trace["y"]) for trace in chart.figure["data"]] == [
        ("notice", [0.05]),
        ("stop", [0.1]),
        ("step", [1.0]),
    ]
    table = page.sections[-1].parts[0]
    assert isinstance(table, Table)
    assert len(table.rows) == 2, "also the kill after which the ranks were killed again"


def test_the_page_of_a_file_is_written_beside_it(tmp_path: Path) -> None:
    (tmp_path / "collectives.json").write_text(json.dumps(collectives()))
    assert CliRunner().invoke(bench, ["page", str(tmp_path / "collectives.json")]).exit_code == 0
    assert "memory_limit" in (tmp_path / "collectives.html").read_text()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("peers mnist --only fabrik", "--only fabrik: there is no peer 'fabrik': did you mean 'fabric'?"),
        ("peers mnist --python nowhere", "--python nowhere: this is no Python interpreter that can be run"),
        ("collectives --sizes ²", "'²' is no number of bytes"),
        ("collectives --sizes 999999999G", "'999999999G' is too large for a message: at most 64G"),
    ],
)
def test_wrong_options_are_named(command: str, words: str) -> None:
    raised = CliRunner().invoke(bench, command.split()).exception
    assert isinstance(raised, InputError)
    assert words in str(raised)
