"""`meshwright train` and `meshwright plan` print what scripts and people rely on. Commands write pages, and the files
from which `report` makes the same pages."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright.auto.decide
import meshwright.train.rank
import meshwright.train.run
from meshwright.auto.decision import Decision
from meshwright.cli.training import print_result
from meshwright.errors import Stopped
from meshwright.job import load_plan
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.proof.compare.errors import ComparedValue, Comparison
from meshwright.proof.proof import Proof
from tests.cli.commands import CommandResult, RefusalOf, RunCommand, file_names

RESULT: dict[str, Any] = {
    "run": "/" + "long/" * 40 + "[/red]:smile:",
    "steps": 12,
    "loss": 0.5,
    "metrics": {"accuracy": 0.9871, "loss": 0.04},
    "samples_per_s": 1234.5,
    "skipped_steps": 7,
    "restarts": 1,
    "predicted_step_s": None,
    "measured_step_s": 0.1,
    "peak_memory_bytes": 5,
}


def last_json(result: CommandResult) -> dict[str, Any]:
    """Returns the JSON object on the last line of a command that succeeded."""
    assert result.exit_code == 0
    printed: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return printed


@pytest.mark.usefixtures("folder")
def test_json_is_the_last_line_of_stdout(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshwright.train.run, "train", lambda *_: RESULT)
    assert last_json(run_command("train", "job.yaml", "--json")) == RESULT


def test_the_json_line_is_the_content_of_result_json(
    folder: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_rank_here(_: str, arguments: list[str], *__: Any) -> None:
        monkeypatch.setattr(sys, "argv", ["rank", *arguments])
        meshwright.train.rank.main()

    monkeypatch.setattr(meshwright.train.run, "launch", run_rank_here)
    monkeypatch.setattr(meshwright.auto.decide, "plan_of_job", lambda *_: Decision(Plan()))
    monkeypatch.setattr(Decision, "step_s", 0.25)
    printed = last_json(run_command("train", "job.yaml", "--json", "--set", "train={steps: 1, global_batch: 30}"))
    assert printed == json.loads((folder / "runs" / "job-0001" / "result.json").read_text())
    assert (printed["run"], printed["predicted_step_s"]) == (str(folder.resolve() / "runs" / "job-0001"), 0.25)


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_stopped_run_ends_with_exit_code_1_and_without_json(
    folder: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    def stop(*_: Any) -> None:
        raise Stopped(f"stopped by {signal}")

    monkeypatch.setattr(meshwright.train.run, "launch", stop)
    result = run_command("train", "job.yaml", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == (
        "meshwright: runs/job-0001: stopped before the end; the same command resumes it"
    )
    assert not (folder / "runs" / "job-0001" / "result.json").exists()


def test_a_run_begins_with_its_plan_and_a_resumed_one_keeps_it(
    folder: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise Stopped("stopped")

    monkeypatch.setattr(meshwright.train.run, "launch", stop)
    assert run_command("train", "job.yaml").stderr.startswith("plan: replicate 2 · fp32, ")
    file = folder / "runs" / "job-0001" / "plan.yaml"
    stored = Plan.model_validate({"axes": {"shard": 2}, "memory": {"recompute": "full"}}).save(file)
    resumed = run_command("train", "job.yaml")
    assert resumed.stderr.startswith(f"plan: {stored.summary()}, with which runs/job-0001 was trained before\n")
    assert load_plan(file) == stored
    assert run_command("train", "job.yaml", "--resume", "never").stderr.startswith("plan: replicate 2 · fp32, ")


def test_people_read_accuracy_speed_and_the_whole_run_path(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT, as_json=False)
    printed = capsys.readouterr().out
    assert "98.71%" in printed
    assert "1,234" in printed
    assert "7 steps, because of NaN or Inf" in printed
    assert RESULT["run"] in printed


def test_the_json_of_a_plan_has_the_fields_that_scripts_rely_on(folder: Path, run_command: RunCommand) -> None:
    report = last_json(run_command("plan", "job.yaml", "--cluster", "2xA100-80GB", "--top", "2", "--json"))
    assert set(report) == {
        *("headline", "figures", "choice", "best", "ranked", "plain", "explanation", "rejected", "candidates"),
        "seconds",
    }
    batch = yaml.safe_load((folder / "job.yaml").read_text())["train"]["global_batch"]
    assert report["figures"]["samples_per_s"] == pytest.approx(batch / report["best"]["step_s"])
    assert f"{report['figures']['parameters']:,} parameters, " in report["headline"]
    assert {entry["name"] for entry in report["plain"]} == {"plain DDP", "plain FSDP"}
    assert report["best"] == report["ranked"][0]
    assert len(report["ranked"]) == 2
    for entry in report["ranked"]:
        assert set(entry) == {"plan", "summary", "step_s", "memory_bytes", "breakdown", "based_on", "untested"}
        assert sum(entry["breakdown"].values()) == pytest.approx(entry["step_s"])
        assert Plan.model_validate(entry["plan"]).summary() == entry["summary"]
    assert all(set(entry) == {"plan", "reason"} for entry in report["rejected"])
    assert file_names(folder) == {"job.yaml"}


@pytest.mark.usefixtures("folder")
def test_people_get_a_table_and_a_plan_that_can_be_trained_with(run_command: RunCommand) -> None:
    result = run_command("plan", "job.yaml", "--cluster", "2xA100-80GB")
    assert result.exit_code == 0
    _, _, text = result.stdout.partition("# the best plan")
    plan = Plan.model_validate(yaml.safe_load("#" + text))
    assert plan.summary() in result.stdout
    first = result.stdout.splitlines()[0]
    assert "parameters, " in first
    assert "(MFU)" in first
    assert "plain FSDP" in first


def test_a_plan_file_is_predicted_without_a_search(
    folder: Path, run_command: RunCommand, refusal_of: RefusalOf
) -> None:
    (folder / "mine.yaml").write_text("axes: {replicate: 2}")
    words = ("plan", "job.yaml", "--plan", "mine.yaml", "--cluster")
    report = last_json(run_command(*words, "2xA100-80GB", "--json"))
    assert [entry["summary"] for entry in report["ranked"]] == ["replicate 2 · fp32"]
    assert report["candidates"] == 1
    report = last_json(run_command(*words, "8xA100-80GB", "--json"))
    assert report["explanation"].startswith("replicate 2 · fp32 on 2 of 8 devices trains ")
    line = refusal_of(*words, "1xA100-80GB")
    assert "the plan (replicate 2 · fp32) is for 2 ranks, but the cluster '1xA100-80GB' has 1 devices" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "64xH9000"], "cluster '64xH9000' is not known"),
        (["--cluster", "2xA100-80GB", "--set", "model.hidden=200000"], "fits no plan on '2xA100-80GB'"),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused_in_one_line(
    refusal_of: RefusalOf, arguments: list[str], words: str
) -> None:
    assert words in refusal_of("plan", "job.yaml", *arguments)


def test_a_plan_without_the_data_says_that_shapes_come_from_generated_data(
    tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = Path(__file__).parents[2] / "jobs" / "linear.yaml"
    words = ["plan", str(job), "--cluster", "2xA100-80GB", "--json", "--set", "data.train.count=100"]
    for partition, splits in (("batch", None), ("dimension", {"layers.0": {"kind": "row", "axis": "tensor"}})):
        result = run_command(*words, "--set", f"data.partition={partition}")
        best = last_json(result)["best"]["plan"]
        assert "data.root is not set: the shapes of a batch are taken from generated data" in result.stderr
        if splits is not None:  # data that is partitioned by dimension determines the splits of the model
            assert best["modules"]["splits"] == splits
            assert best["axes"]["tensor"] == 2


def test_report_makes_the_page_of_plan_from_its_details(folder: Path, run_command: RunCommand) -> None:
    files = ("--html", "plan.html", "--details", "plan.json")
    assert run_command("plan", "job.yaml", "--cluster", "2xH100", *files).exit_code == 0
    assert json.loads((folder / "plan.json").read_text())["title"] == "job"
    assert run_command("report", "plan.json", "--output", "again.html").exit_code == 0
    assert (folder / "again.html").read_text() == (folder / "plan.html").read_text()


def test_prove_writes_its_page_and_every_comparison(
    folder: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = (ComparedValue(1, "loss", None, 0, 1e-14, 1e-11),)
    comparison = Comparison().with_tolerance(1e-11).with_error(1, "loss", None, 1e-14)
    proof = Proof(Plan(axes=Axes(replicate=2)), 2, "cpu", 1, "fp64", comparison, "tolerance", (), values=values)
    monkeypatch.setattr("meshwright.proof.prove.prove", lambda *_, **__: proof)
    Plan(axes=Axes(replicate=2)).save(folder / "plan.yaml")
    result = run_command("prove", "job.yaml", "--plan", "plan.yaml", "--output", "proof.json", "--html", "proof.html")
    assert result.exit_code == 0
    assert json.loads((folder / "proof.json").read_text())["compared"]["rows"] == [[1, "loss", None, 0, 1e-14, 1e-11]]
    assert "Proof of job" in (folder / "proof.html").read_text()
    assert not list(folder.glob("runs/*proof*")), "--output replaces the file in the folder of runs"


def test_files_that_cannot_be_written_are_refused_before_the_work(refusal_of: RefusalOf, folder: Path) -> None:
    refusal = refusal_of("plan", "job.yaml", "--html", "missing/plan.html")
    assert "--html missing/plan.html: there is no folder missing" in refusal
    assert "--details ." in refusal_of("plan", "job.yaml", "--details", ".")
    assert "--html missing/a.html" in refusal_of("prove", "job.yaml", "--html", "missing/a.html")
    assert "there is no folder missing" in refusal_of("bench", "loading", "--output", "missing/bench.json")
    (folder / "other.json").write_text('{"loss": 1}')
    assert "neither a plan nor a proof, audit or benchmark" in refusal_of("report", "other.json")
