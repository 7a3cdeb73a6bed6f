"""Ready jobs are used by name from anywhere, listed by `meshwright jobs`, and completed by shells."""

import json
from pathlib import Path

import pytest

from meshwright.cli.ready_jobs import find_job, job_title, ready_jobs
from meshwright.job import load_job, load_plan
from tests.cli.commands import RefusalOf, RunCommand, file_names

REPOSITORY = Path(__file__).parents[2]


def test_the_package_has_the_jobs_of_the_repository() -> None:
    files = {file.name for file in (REPOSITORY / "jobs").glob("*.yaml")}
    assert {file.name for file in ready_jobs().values()} == files
    assert "mnist.yaml" in files


def test_jobs_are_listed_with_a_line_each(run_command: RunCommand) -> None:
    lines = run_command("jobs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(ready_jobs())
    (digits,) = [line for line in lines if line.startswith("mnist")]
    assert "  The default job: a small convolutional network on handwritten digits" in digits
    assert all(20 < len(line) < 160 for line in lines)


def test_jobs_are_listed_as_json(run_command: RunCommand) -> None:
    rows = json.loads(run_command("jobs", "--json").stdout)["jobs"]
    assert [row["name"] for row in rows] == list(ready_jobs())
    assert all(row["title"] and Path(row["file"]).is_file() for row in rows)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# Digits (few of them): a net\n# on them. More.\nmodel: 1", "Digits: a net on them"),
        ("# One line.\n", "One line"),
        ("model: 1\n# later", ""),
    ],
)
def test_the_title_of_a_job_is_the_first_sentence_of_its_comment(text: str, title: str) -> None:
    assert job_title(text) == title


def test_a_name_is_a_ready_job_unless_a_file_has_it(folder: Path) -> None:
    (folder / "mnist").mkdir()
    assert find_job("mnist") == ready_jobs()["mnist"]
    (folder / "gpt").write_text((folder / "job.yaml").read_text())
    assert find_job("gpt") == Path("gpt")
    assert find_job("jobs/mnist.yaml") == Path("jobs/mnist.yaml")
    assert load_job(find_job("mnist")).name == "mnist"


@pytest.mark.parametrize("command", ["train", "plan", "prove", "bench strategies", "init --output new.yaml"])
def test_an_unknown_name_is_refused_with_the_nearest(refusal_of: RefusalOf, command: str) -> None:
    line = refusal_of(*command.split(), "mnst")
    assert line == (
        "meshwright: 'mnst' is no job file, and no ready job has this name: did you mean 'mnist'?"
        " (`meshwright jobs` lists them)\n"
    )


@pytest.mark.usefixtures("folder")
def test_the_best_plan_is_written_and_read_back(folder: Path, run_command: RunCommand) -> None:
    for _ in range(2):  # the second one replaces the file
        result = run_command("plan", "mnist", "--cluster", "2xA100-80GB", "--output", "plan.yaml", "--json")
        assert result.exit_code == 0
    assert file_names(folder) == {"job.yaml", "plan.yaml"}
    best = json.loads(result.stdout)["best"]
    assert load_plan("plan.yaml").summary() == best["summary"]
    given = run_command("plan", "mnist", "--cluster", "2xA100-80GB", "--plan", "plan.yaml", "--json")
    assert json.loads(given.stdout)["best"]["summary"] == best["summary"]


def test_a_plan_cannot_be_written_without_a_folder_or_over_one(folder: Path, refusal_of: RefusalOf) -> None:
    (folder / "there").mkdir()
    assert "--output none/plan.yaml: there is no folder none" in refusal_of(
        "plan", "job.yaml", "--output", "none/plan.yaml"
    )
    assert "--output there: this is a folder" in refusal_of("plan", "job.yaml", "--output", "there")


def test_the_version_is_printed(run_command: RunCommand) -> None:
    result = run_command("--version")
    assert (result.exit_code, result.stdout) == (0, "meshwright 0.1.0\n")


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("train mn", ["mnist"]),
        ("prove resnet", ["resnet18", "resnet50"]),
        ("bench strategies mn", ["mnist"]),
        ("plan t", ["timm:", "torchvision:", "two_tower"]),
        ("init h", ["hf:"]),
        ("train job.y", []),  # then the shell completes names of files
        ("tr", ["train"]),
    ],
)
def test_shells_complete_commands_and_jobs(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, words: str, completions: list[str]
) -> None:
    monkeypatch.setenv("_MESHWRIGHT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"meshwright {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    result = run_command()
    assert result.exit_code == 0
    assert sorted(result.stdout.split()) == completions


def test_an_unknown_command_is_refused_with_the_nearest(refusal_of: RefusalOf) -> None:
    assert "No such command 'job'. Did you mean 'jobs'?" in refusal_of("job")
