"""Constraints and questions on the command line."""

import json
from pathlib import Path

import pytest

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
        (["--batch", "7"], "--batch 7: write --batch max"),
        (["--batch", "max", "--sweep", "devices=1..2"], "--batch and --sweep are two questions"),
        (["--price", "2"], "--price belongs to --sweep"),
        (["--sweep", "sequence=8"], "the job's data.train has no keyword 'sequence'"),
        (["--sweep", "devices=1..2", "--output", "plan.yaml"], "--output is for one plan"),
        (["--batch", "max", "--full"], "--full is for one plan"),
        (["--sweep", "devices=1", "--sweep", "devices=2"], "--sweep is there twice: leave out one"),
        (["--max-memory", "40"], "--max-memory is '40', which is 40 bytes, below 1 MB: write the unit"),
        (["--max-memory", "４０GB"], "write a size such as 40GB"),
        (["--precision", ""], "--fix numerics.precision=: write a field of a plan and its value"),
        (["--fix", "axes.tensor=true"], "axes.tensor is true: write a number"),
        (["--fix", "gradients.algorithm=ring"], "which combines gradients of CPU ranks, but '2xA100-80GB' has GPUs"),
        (["--fix", "compute.convolutions=nnpack"], "whose kernels are for CPUs, but '2xA100-80GB' has GPUs"),
        (["--sweep", "link=400G"], "'2xA100-80GB' is one machine"),
        (["--sweep", "devices=²"], "'²' is no number above 0"),
        (["--sweep", "devices=1..99999999999"], "devices is 99999999999: at most 65,536"),
        (["--sweep", "nodes=99999"], "99999: at most 65,536"),
        (["--sweep", "batch=2147483648"], "at most 2,147,483,647"),
        (["--sweep", "gpu=A100-80GB,"], "'' is no"),
        (["--sweep", "gpu=A100-80GB,H1000"], "there is no device 'H1000'"),
        (["--sweep", "gpu=A100-80GB", "--price", "2"], "--price 2 is that of one kind of device"),
        (["--sweep", "link=fast"], "fast"),
        (["--sweep", "devices=1..2", "--price", "nan"], "Invalid value for '--price'"),
        (["--sweep", "devices=1..2", "--price", "0"], "--price 0.0: write a number above 0"),
        (["--sweep", "devices=1..2", "--what-if", "compute=²x"], "'²x' is no factor"),
        (["--sweep", "devices=1..2", "--what-if", "compute=0x"], "'0x' is no factor"),
        (["--sweep", "devices=1..2", "--what-if", "memory=lots"], "--what-if memory is 'lots'"),
    ],
)
def test_wrong_words_are_refused_in_one_line(refusal_of: RefusalOf, words: list[str], message: str) -> None:
    assert message in refusal_of("plan", "job.yaml", *CLUSTER, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "speed", "--clusters", "A100-80GB"], "--for speed: write time, cost or devices"),
        (["--for", "time"], "--for needs clusters to choose from"),
        (["--for", "time", "--clusters", "A100-80GB", "--deadline", "soon"], "--deadline soon: write a time"),
        (["--for", "time", "--clusters", "A100-80GB", *CLUSTER], "--for chooses among --clusters: leave out --cluster"),
        (["--for", "cost", "--clusters", "A100-80GB=-1"], "the price of A100-80GB is '-1'"),
        (["--for", "cost", "--clusters", "A100-80GB=1", "--budget", "inf"], "--budget inf: write a number above 0"),
        (["--for", "cost", "--clusters", ","], "there is no cluster"),
        (["--for", "cost", "--clusters", "prices.yaml"], "there is no such clusters file"),
        (["--for", "cost", "--clusters", "8xA1000=3"], "there is no device 'A1000'"),
        (["--for", "cost", "--clusters", "A100=3,A100=4"], "'A100' is there twice"),
        (["--for", "cost", "--clusters", "A100=3,lab.yaml"], "lab.yaml: there is no such cluster file"),
        (["--for", "time", "--clusters", "A100=3", "--epochs", "99999999999"], "Invalid value for '--epochs'"),
    ],
)
def test_wrong_goals_are_refused_in_one_line(refusal_of: RefusalOf, words: list[str], message: str) -> None:
    assert message in refusal_of("plan", "job.yaml", *words)


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
    words = ("plan", "job.yaml", *CLUSTER)
    sweep = run_command(*words, "--sweep", "devices=1..2", "--json", "--html", "sweep.html")
    rows = json.loads(sweep.stdout.splitlines()[-1])["rows"]
    single = json.loads(run_command(*words, "--json").stdout.splitlines()[-1])
    assert rows[1]["step_s"] == single["best"]["step_s"]
    assert "</html>" in (folder / "sweep.html").read_text()
    (folder / "answer.json").write_text(sweep.stdout)
    assert run_command("report", "answer.json").exit_code == 0
    assert "samples per second" in run_command(*words, "--batch", "max").stdout
    goal = run_command(*words, "--for", "cost", "--clusters", "A100-80GB=2,2xA100-80GB=4", "--epochs", "2").stdout
    assert "The cheapest cluster that trains" in goal
    Plan(axes=Axes(replicate=2)).save(folder / "a.yaml")
    Plan(axes=Axes(shard=2)).save(folder / "b.yaml")
    assert "They differ in axes.replicate: 2 → 1" in run_command(*words, "--explain", "a.yaml", "b.yaml").stdout
    diagnosis = run_command("doctor", "--job", "job.yaml", *CLUSTER, "--json").stdout.splitlines()[-1]
    assert json.loads(diagnosis)["runs"] is True
