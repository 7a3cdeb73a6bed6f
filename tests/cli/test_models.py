"""`meshwright plan` takes the name of a model instead of a job, and `meshwright init` writes a job for it."""

import json
from pathlib import Path

import pytest

from meshwright.auto.decide import replicate_plan
from meshwright.cli.ready_jobs import ready_jobs
from meshwright.cluster.detect import find_cluster
from meshwright.job import load_job
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from tests.cli.commands import RefusalOf, RunCommand, file_names
from tests.zoo_models.configs import write_config


def test_a_model_is_planned_without_a_job(folder: Path, run_command: RunCommand) -> None:
    model = f"hf:{write_config(folder, 'llama').name}"
    before = file_names(folder)
    words = ("--cluster", "2xH100", "--sequence", "8", "--global-batch", "64", "--top", "2", "--json")
    result = run_command("plan", model, *words, "--output", "plan.yaml")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert len(report["ranked"]) == 2
    assert report["best"]["plan"]["numerics"]["precision"] == "bf16", "without a job, plans may change the arithmetic"
    assert file_names(folder) == before | {"plan.yaml"}
    sgd = "optimizer={call: torch.optim:SGD, lr: 0.1}"
    given = run_command("plan", model, *words, "--plan", "plan.yaml", "--set", sgd)
    assert json.loads(given.stdout.splitlines()[-1])["best"]["memory_bytes"] < report["best"]["memory_bytes"]


@pytest.mark.soak
def test_a_model_for_pictures_is_planned_without_a_job(folder: Path, run_command: RunCommand) -> None:
    words = ("--cluster", "2xA100-80GB", "--image", "32", "--top", "1", "--json")
    result = run_command("plan", "timm:test_resnet", *words)
    assert result.exit_code == 0, result.stderr
    assert file_names(folder) == {"job.yaml"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan hf:lama", "did you mean 'llama'?"),
        ("plan timm:", "timm:: write the model after the colon, such as timm:resnet50"),
        (
            "plan job.yaml --sequence 8",
            "--sequence 8: this option is for models such as hf:llama; for a job, use --set",
        ),
        ("plan mnist --global-batch 8", "for a job, use --set train.global_batch=N"),
        ("plan hf:llama --sequence 0", "Invalid value for '--sequence'"),
        ("train hf:llama", "hf:llama is a model, not a job: write one with `meshwright init hf:llama`"),
        ("prove timm:resnet50", "timm:resnet50 is a model, not a job"),
        ("init", "job.yaml exists: choose another file with --output, or replace it with --force"),
        ("init hf:llama", "job.yaml exists"),
        ("init hf:lama --output new.yaml", "did you mean 'llama'?"),
        ("init --output none/new.yaml", "--output none/new.yaml: there is no folder none"),
        (
            "init job.yaml --output new.yaml",
            "job.yaml is a path: write hf:job.yaml for a model, or the name of a",
        ),
        ("init mnist --image 32 --output new.yaml", "--image 32: this option is for models such as hf:llama"),
    ],
)
def test_wrong_names_and_options_are_refused(refusal_of: RefusalOf, words: str, message: str) -> None:
    assert message in refusal_of(*words.split())


def _words_of(model: str, folder: Path) -> list[str]:
    """Returns the argument of `init` for a ready job, a model, or the name of one of our configs after `hf:`."""
    if model == "template":
        return []
    source, _, name = model.partition(":")
    return [f"hf:{write_config(folder, name)}" if source == "hf" else model]


@pytest.mark.parametrize("model", ["template", "mnist", "hf:llama", "hf:vit", "timm:test_resnet"])
def test_init_writes_a_job_that_passes_the_checks_before_a_run(
    folder: Path, run_command: RunCommand, model: str
) -> None:
    result = run_command("init", *_words_of(model, folder), "--output", "new.yaml")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "wrote new.yaml: try `meshwright plan new.yaml`, then `prove` and `train`\n"
    assert (folder / "new.yaml").read_text().startswith("# ")
    job = load_job("new.yaml")
    assert job.name == "new"
    cluster = find_cluster("2xcpu")
    check_job(job, replicate_plan(cluster, job.train.global_batch), cluster, JobParts(job))


def test_init_replaces_a_file_with_force_and_copies_ready_jobs(folder: Path, run_command: RunCommand) -> None:
    assert run_command("init", "gpt", "--force").exit_code == 0
    assert (folder / "job.yaml").read_text() == ready_jobs()["gpt"].read_text()
    assert file_names(folder) == {"job.yaml"}


@pytest.mark.soak
@pytest.mark.parametrize("model", ["template", "hf:t5", "hf:vit", "hf:gpt2_classes", "timm:test_resnet"])
def test_the_job_of_init_is_planned_proved_and_trained_as_it_is(
    tmp_path: Path, run_command: RunCommand, model: str
) -> None:
    job, words = str(tmp_path / "job.yaml"), _words_of(model, tmp_path)
    sizes = {"template": [], "hf:t5": ["--global-batch", "8", "--sequence", "8"]}.get(model, ["--global-batch", "8"])
    assert run_command("init", *words, *sizes, "--output", job).exit_code == 0
    plan = run_command("plan", job, "--cluster", "2xA100-80GB")
    assert plan.exit_code == 0, plan.stderr
    settings = [f"output={tmp_path / 'runs'}", "plan.axes.replicate=2", "cluster=2xcpu"]
    proof = run_command("prove", job, *_set(settings))
    assert proof.exit_code == 0, proof.stdout + proof.stderr
    settings += ["train.steps=20", "log.every_steps=1", *(["data.eval.samples=8"] if ":" in model else [])]
    trained = run_command("train", job, *_set(settings))
    assert trained.exit_code == 0, trained.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "job-0001" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]


def _set(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
