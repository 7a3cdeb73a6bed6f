"""`bench faults`: killed runs of a small job end with the weights of the undisturbed one, and the report says how long
they took to go on. A report of a run that lost something, or left something behind, says so."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.forking.forked import start_command_with
from tests.train.runs.test_faults import JOB, STEPS
from validation.bench.faults.measure import FaultRequest, measure
from validation.bench.faults.report import FaultReport

PARTS = ["notice", "stop", "start", "join", "build", "load", "step"]


def request_for(folder: Path, kills: int, without_spare: int = 0, seed: int = 0) -> FaultRequest:
    file = folder / "toy.yaml"
    plan = {"axes": {"replicate": 2}, "gradients": {"bucket_bytes": 8000}}
    file.write_text(yaml.safe_dump({**JOB, "cluster": "2xcpu", "plan": plan}))
    settings = ["checkpoint.every_steps=5", "log.eval_every_steps=10"]
    return FaultRequest(str(file), "toy", None, None, settings, kills, without_spare, seed)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> FaultReport:
    """Two kills: in a backward pass, and in a save."""
    folder = tmp_path_factory.mktemp("faults")
    return measure(request_for(folder, kills=2, seed=3), folder / "runs", start=start_command_with)


@pytest.mark.soak
def test_killed_runs_lose_nothing_and_end_with_the_same_weights(report: FaultReport) -> None:
    (comparison,) = report.comparisons
    assert comparison.leftovers == ()
    assert comparison.is_bitwise_equal
    assert [kill.during for kill in comparison.run.kills] == ["backward", "save"]
    assert len(comparison.run.kills) == comparison.run.result["restarts"] == 2
    assert comparison.run.result["steps"] == STEPS
    assert report.is_good


@pytest.mark.soak
def test_the_report_has_the_times_of_recoveries_with_their_parts(report: FaultReport) -> None:
    shown = report.to_json()
    summary = shown["summary"]["with spare"]
    assert (summary["kills"], summary["restarts"], summary["lost_steps"], summary["bitwise_equal"]) == (2, 2, 0, True)
    for row in shown["rows"]:
        assert row["resumed"] >= row["committed"]
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"], abs=0.001)
        assert [part for part in row["parts"] if part != "evaluate"] == PARTS
    assert summary["recovery_s"] > 0
    assert summary["spare_memory_bytes"] > 1e6
    result = report.comparisons[0].run.result
    assert result["recovery_s"] < summary["recovery_s"], "the launcher cannot know how long it took to notice"
    assert list(result["recovery_parts_s"]) == [part for part in summary["parts_s"] if part != "notice"]
    err = (report.comparisons[0].run.folder.path.parents[1] / "stderr").read_text()
    assert err.count("s after the failure was noticed: stop ") == 2
    text = "\n".join(report.lines())
    assert "committed steps lost: 0; final weights: bitwise those of the undisturbed run" in text


@pytest.mark.soak
def test_whatever_is_wrong_makes_the_report_bad(report: FaultReport) -> None:
    (good,) = report.comparisons
    kill = replace(good.run.kills[0], committed=20, resumed=15)
    lossy = replace(good, run=replace(good.run, kills=(kill, *good.run.kills[1:])))
    assert lossy.summary()["lost_steps"] == 5
    wrong = [
        lossy,
        replace(good, is_bitwise_equal=False),
        replace(good, leftovers=("process 1 is running",)),
        replace(good, planned=3),
        replace(good, run=replace(good.run, result={**good.run.result, "restarts": 3})),
    ]
    for comparison in wrong:
        assert not replace(report, comparisons=(comparison,)).is_good
    assert "NOT those" in "\n".join(replace(report, comparisons=(wrong[1],)).lines())
    assert "left behind: process 1" in "\n".join(replace(report, comparisons=(wrong[2],)).lines())


@pytest.mark.soak
def test_twenty_kills_of_the_mnist_job(tmp_path: Path) -> None:
    settings = ["data.eval.limit=256", "train.steps=150", "plan.axes.replicate=2"]
    request = FaultRequest("jobs/mnist.yaml", "mnist", None, "2xcpu", settings, 20, 2, seed=1)
    report = measure(request, tmp_path / "runs", start=start_command_with)
    assert report.is_good, "\n".join(report.lines())
    parts = {kill.during for kill in report.comparisons[0].run.kills}
    assert {"start", "restart", "save", "evaluation"} <= parts
