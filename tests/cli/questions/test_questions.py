"""Constraints and questions on the command line."""

import json
from pathlib import Path

import pytest
import yaml

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from tests.cli.commands import RefusalOf, RunCommand

CLUSTER = ("--cluster", "2xA100-80GB")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fix", "axes.tensr=2"], "'axes.tensr' is no field of a plan: did you mean 'axes.tensor'?"),
        (["--fix", "axes.shard=2", "--avoid", "shard"], "axes.shard is fixed to 2, but 'shard' is avoided"),
        (["--set", "plan.axes.pipeline=3"], "pipeline(3), make 3 ranks, which do not divide the 2 devices"),
        (["--set", "plan=other.yaml"], "this command searches for a plan"),
        (["--max-memory", "much"], "--max-memory is 'much'"),
        (["--batch", "7"], "--batch 7: write meshwright ask batch JOB"),
        (["--batch", "max", "--sweep", "devices=1..2"], "--batch and --sweep are two questions"),
        (["--price", "2"], "--price belongs to --sweep"),
        (["--sweep", "devices=1..2", "--output", "plan.yaml"], "--output is for one plan"),
        (["--batch", "max", "--full"], "--full is for one plan"),
        (["--sweep", "devices=1", "--sweep", "devices=2"], "--sweep is there twice: leave out one"),
        (["--max-memory", "40"], "--max-memory is '40', which is 40 bytes, below 1 MB: write the unit"),
        (["--max-memory", "４０GB"], "write a size such as 40GB"),
        (["--precision", ""], "--fix numerics.precision=: write a field of a plan and its value"),
        (["--fix", "axes.tensor=true"], "axes.tensor is true: write a number"),
        (["--fix", "gradients.algorithm=ring"], "which combines gradients of CPU ranks, but '2xA100-80GB' has GPUs"),
        (["--fix", "compute.convolutions=nnpack"], "whose kernels are for CPUs, but '2xA100-80GB' has GPUs"),
    ],
)
def test_wrong_words_are_refused_in_one_line(refusal_of: RefusalOf, words: list[str], message: str) -> None:
    assert message in refusal_of("plan", "job.yaml", *CLUSTER, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sequence=8"], "the job's data.train has no keyword 'sequence'"),
        (["link=400G"], "'2xA100-80GB' is one machine"),
        (["devices=²"], "'²' is no number above 0"),
        (["devices=1..99999999999"], "devices is 99999999999: at most 65,536"),
        (["nodes=99999"], "99999: at most 65,536"),
        (["batch=2147483648"], "at most 2,147,483,647"),
        (["gpu=A100-80GB,"], "'' is no"),
        (["gpu=A100-80GB,H1000"], "there is no device 'H1000'"),
        (["gpu=A100-80GB", "--price", "2"], "--price 2 is that of one kind of device"),
        (["link=fast"], "fast"),
        (["devices=1..2", "--price", "nan"], "Invalid value for '--price'"),
        (["devices=1..2", "--price", "0"], "--price 0.0: write a number above 0"),
        (["devices=1..2", "--what-if", "compute=²x"], "'²x' is no factor"),
        (["devices=1..2", "--what-if", "compute=0x"], "'0x' is no factor"),
        (["devices=1..2", "--what-if", "memory=lots"], "what-if memory is 'lots'"),
        (["devices=1..2", "--what-if", "link=2x", "--cluster", "2xH100"], "--cluster is there twice"),
    ],
)
def test_wrong_sweeps_are_refused_in_one_line(refusal_of: RefusalOf, words: list[str], message: str) -> None:
    assert message in refusal_of("ask", "sweep", "job.yaml", *words, *CLUSTER)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed", "--clusters", "A100-80GB"], "the goal is 'speed': write time, cost or devices"),
        (["time"], "there is no cluster to choose: write --cluster 8xH100"),
        (["time", "--clusters", "A100-80GB", "--deadline", "soon"], "--deadline soon: write a time"),
        (["time", "--clusters", "A100-80GB", *CLUSTER], "chooses among --clusters: leave out one of them"),
        (["cost", "--clusters", "A100-80GB=-1"], "the price of A100-80GB is '-1'"),
        (["cost", "--clusters", "A100-80GB=1", "--budget", "inf"], "--budget inf: write a number above 0"),
        (["cost", "--clusters", ","], "there is no cluster"),
        (["cost", "--clusters", "prices.yaml"], "there is no such clusters file"),
        (["cost", "--clusters", "8xA1000=3"], "there is no device 'A1000'"),
        (["cost", "--clusters", "A100=3,A100=4"], "'A100' is there twice"),
        (["cost", "--clusters", "A100=3,lab.yaml"], "lab.yaml: there is no such cluster file"),
        (["time", "--clusters", "A100=3", "--epochs", "99999999999"], "Invalid value for '--epochs'"),
        (["cost", *CLUSTER], "'2xA100-80GB' has no price, which the goal cost and --budget need"),
        (["cost", "--tokens", "lots", *CLUSTER], "--tokens is 'lots': write a number such as 1B, 1.5T, 300M"),
        (["cost", "--tokens", "0", *CLUSTER], "--tokens is '0': write a number from 1 to"),
        (["cost", "--tokens", "1B", "--epochs", "2", *CLUSTER], "--epochs 2 and --tokens 1B both say how long"),
        (
            ["cost", "--tokens", "1B", "--price", "2", *CLUSTER],
            "the samples of this model have no tokens: write --samples",
        ),
        (["cost", "--samples", "1 lot", *CLUSTER], "--samples is '1 lot'"),
        (["cost", "--price", "2", "--clusters", "A100=3"], "--price 2 is for --cluster: --clusters has prices"),
    ],
)
def test_wrong_goals_are_refused_in_one_line(refusal_of: RefusalOf, words: list[str], message: str) -> None:
    assert message in refusal_of("ask", "for", "job.yaml", *words)


def test_constraints_of_set_and_of_the_job_are_kept(run_command: RunCommand, folder: Path) -> None:
    words = ("plan", "job.yaml", *CLUSTER, "--json")
    fixed = json.loads(run_command(*words, "--set", "plan.axes.shard=2").stdout.splitlines()[-1])
    assert fixed["best"]["plan"]["axes"]["shard"] == 2
    assert fixed["constraints"]["fix"] == {"axes.shard": 2}
    in_job = json.loads(run_command(*words, "--set", "constraints.fix.axes.shard=2").stdout.splitlines()[-1])
    assert in_job["best"]["plan"] == fixed["best"]["plan"]
    assert in_job["constraints"]["cost"] == fixed["constraints"]["cost"]


@pytest.mark.soak
def test_questions_have_tables_json_and_pages(run_command: RunCommand, folder: Path) -> None:
    sweep = run_command("ask", "sweep", "job.yaml", "devices=1..2", *CLUSTER, "--json", "--html", "sweep.html")
    rows = json.loads(sweep.stdout.splitlines()[-1])["rows"]
    single = json.loads(run_command("plan", "job.yaml", *CLUSTER, "--json").stdout.splitlines()[-1])
    assert rows[1]["step_s"] == single["best"]["step_s"]
    assert "</html>" in (folder / "sweep.html").read_text()
    (folder / "answer.json").write_text(sweep.stdout)
    assert run_command("report", "answer.json").exit_code == 0
    assert "samples per second" in run_command("ask", "batch", "job.yaml", *CLUSTER).stdout
    clusters = ("--clusters", "A100-80GB=2,2xA100-80GB=4")
    goal = run_command("ask", "for", "job.yaml", "cost", *clusters, "--epochs", "2").stdout
    assert "The cheapest cluster that trains" in goal
    Plan(axes=Axes(replicate=2)).save(folder / "a.yaml")
    Plan(axes=Axes(shard=2)).save(folder / "b.yaml")
    difference = run_command("ask", "explain", "job.yaml", "a.yaml", "b.yaml", *CLUSTER).stdout
    assert "They differ in axes.replicate: 2 → 1" in difference
    diagnosis = run_command("doctor", "--job", "job.yaml", *CLUSTER, "--json").stdout.splitlines()[-1]
    assert json.loads(diagnosis)["runs"] is True


def test_the_cost_of_a_number_of_samples_is_that_of_its_steps(run_command: RunCommand, folder: Path) -> None:
    words = ("ask", "for", "job.yaml", "cost", *CLUSTER, "--price", "2.5", "--json")
    answer = json.loads(run_command(*words, "--samples", "1M").stdout.splitlines()[-1])
    batch = yaml.safe_load((folder / "job.yaml").read_text())["train"]["global_batch"]
    assert answer["steps"] == -(-1_000_000 // batch)
    row = answer["best"]
    assert row["run_s"] == pytest.approx(answer["steps"] * row["step_s"])
    assert row["run_cost"] == pytest.approx(2 * 2.5 * row["run_s"] / 3600)
    assert f"Training 1 million samples ({answer['steps']:,} steps) on 2xA100-80GB takes" in answer["explanation"]


def test_the_options_of_plan_still_ask_and_say_the_new_command(run_command: RunCommand, folder: Path) -> None:
    old = run_command("plan", "job.yaml", *CLUSTER, "--sweep", "batch=64,128", "--json")
    new = run_command("ask", "sweep", "job.yaml", "batch=64,128", *CLUSTER, "--json")
    rows = [json.loads(result.stdout.splitlines()[-1])["rows"] for result in (old, new)]
    assert rows[0] == rows[1]
    line = "plan --sweep is now `meshwright ask sweep job.yaml batch=64,128`, with the same other options"
    assert old.stderr.splitlines()[-1].startswith(line)
    assert "is now" not in new.stderr
    shown = run_command("plan", "--help").stdout
    assert "meshwright ask" in shown
    assert not any(name in shown for name in ("--sweep", "--for ", "--batch ", "--explain", "--what-if", "--deadline"))


def test_what_if_compares_the_cluster_with_a_changed_one(run_command: RunCommand, folder: Path) -> None:
    words = ("ask", "what-if", "job.yaml", "compute=0.0001x", "memory=160GB", *CLUSTER)
    result = run_command(*words, "--json", "--html", "change.html")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert [row["change"] for row in answer["rows"]] == ["as it is", "compute=0.0001x", "memory=160GB"]
    as_it_is, slower, _ = answer["rows"]
    assert slower["step_s"] > as_it_is["step_s"]
    single = json.loads(run_command("plan", "job.yaml", *CLUSTER, "--json").stdout.splitlines()[-1])
    assert as_it_is["step_s"] == single["best"]["step_s"]
    loss = 1 - slower["samples_per_s"] / as_it_is["samples_per_s"]
    assert "With memory=160GB, '2xA100-80GB' would be as fast as it is, with the same plan." in answer["explanation"]
    assert (
        f"With compute=0.0001x, '2xA100-80GB' would train {loss:.1%} fewer samples per second" in answer["explanation"]
    )
    assert "</html>" in (folder / "change.html").read_text()
