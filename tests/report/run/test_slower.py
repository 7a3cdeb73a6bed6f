"""`meshwright explain`: why a run was slower than predicted, from its own measurements."""

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.numbers.units import seconds_text
from meshwright.report.page import Table, render
from meshwright.report.question_page import question_page
from meshwright.report.run.kinds import KINDS
from meshwright.report.run.slower import explain_run, slow_ranks
from meshwright.train.output.folder import RunFolder
from tests.report.made_up_run import SLOW_RANK, STEP_S, make_run


def test_a_slow_rank_is_named_and_differences_add_up(tmp_path: Path) -> None:
    answer = explain_run(make_run(tmp_path / "run"))
    values = answer.values
    assert values["predicted_step_s"] == pytest.approx(STEP_S)
    assert sum(values["differences"].values()) == pytest.approx(values["measured_step_s"] - STEP_S)
    assert [slow["rank"] for slow in values["slow_ranks"]] == [SLOW_RANK]
    assert values["slow_ranks"][0]["cause"] == "computing"
    assert f"The others wait for rank {SLOW_RANK}, whose own work takes 1." in " ".join(answer.sentences)
    assert answer.sentences[-1] == "The prediction is based on constants of the hardware that are measured."
    assert len(answer.rows) == 1 + 4
    page = question_page({**answer.to_dict(), "title": "run"})
    (table,) = [part for part in page.sections[0].parts if isinstance(part, Table)]
    assert table.rows[0][:2] == ["predicted", seconds_text(values["predicted"]["computing"])]
    assert "</html>" in render(page)


def test_loading_that_is_slower_than_predicted_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=1)
    for file in RunFolder(folder).times.glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if "seconds" in line and "steps" in line:
                line["seconds"]["data"] = 0.1 * line["steps"]
        file.write_text("\n".join(map(json.dumps, lines)))
    answer = explain_run(folder)
    assert max(answer.values["differences"], key=answer.values["differences"].__getitem__) == "waiting for data"
    assert "raise data.workers" in " ".join(answer.sentences)


def test_a_rank_that_loads_slowly_is_named_with_loading_as_the_cause() -> None:
    """The times are those of a run of two ranks, of which one had a loader that slept."""
    rank_0 = dict(zip(KINDS, (0.0559, 0.0022, 0.185, 0.0399, 0.0009), strict=True))
    rank_1 = dict(zip(KINDS, (0.0688, 0.0022, 0.0, 0.213, 0.0), strict=True))
    (slow,) = slow_ranks({0: rank_0, 1: rank_1})
    assert (slow.rank, slow.cause) == (1, "waiting for data")
    assert slow.relative == pytest.approx((0.0688 + 0.213) / (0.0559 + 0.0399 + 0.0009))
    assert "rank 1, whose own work takes 2.91 times as long" in slow.describe()
    assert "213 ms of waiting for data instead of 39.9 ms" in slow.describe()
    assert slow_ranks({0: rank_1}) == []


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run", ranks=2))
    times = {file: file.read_text() for file in folder.times.glob("*.jsonl")}
    for file, text in times.items():
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            if "seconds" in line and "steps" in line:
                line["seconds"]["forward"] = float("nan")
        file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match="not all of them are finite"):
        explain_run(tmp_path / "run")
    page = json.loads(folder.page.read_text())
    page["prediction"]["breakdown"]["compute"] = "x"
    folder.page.write_text(json.dumps(page))
    with pytest.raises(InputError, match="its terms are not all numbers"):
        explain_run(tmp_path / "run")


def test_a_run_without_a_prediction_or_without_times_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=1)
    RunFolder(folder).page.write_text("{}")
    with pytest.raises(InputError, match="has no prediction"):
        explain_run(folder)
    for file in RunFolder(folder).times.glob("*.jsonl"):
        file.unlink()
    with pytest.raises(InputError, match="has recorded no times"):
        explain_run(folder)
