"""`meshwright explain`: why a run was slower than predicted, from its own measurements."""

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.report.page import render
from meshwright.report.questions.page import question_page
from meshwright.report.run.slower import explain_run
from meshwright.train.output.folder import RunFolder
from tests.report.made_up_run import SLOW_RANK, STEP_S, make_run


def test_a_slow_rank_is_named_and_differences_add_up(tmp_path: Path) -> None:
    answer = explain_run(make_run(tmp_path / "run"))
    values = answer.values
    assert values["predicted_step_s"] == pytest.approx(STEP_S)
    assert sum(values["differences"].values()) == pytest.approx(values["measured_step_s"] - STEP_S)
    assert [slow["rank"] for slow in values["slow_ranks"]] == [SLOW_RANK]
    assert f"Rank {SLOW_RANK} computes 1." in " ".join(answer.sentences)
    assert len(answer.rows) == 1 + 4
    assert "</html>" in render(question_page({**answer.to_dict(), "title": "run"}))


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


def test_a_run_without_a_prediction_or_without_times_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=1)
    RunFolder(folder).page.write_text("{}")
    with pytest.raises(InputError, match="has no prediction"):
        explain_run(folder)
    for file in RunFolder(folder).times.glob("*.jsonl"):
        file.unlink()
    with pytest.raises(InputError, match="has recorded no times"):
        explain_run(folder)
