"""`export` and `prove --against` execute nothing that the job.yaml of a foreign run imports, unless --trust is said."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from tests.cli.commands import RunCommand
from tests.cli.recorded_run import recorded_run

ONE_RANK = ("--set", "plan.axes.replicate=1")
IMPORTS = "tests.train.toy:Net, tests.train.toy:points, torch.nn.functional:cross_entropy, torch.optim:AdamW"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("runs") / "toy-0001")


@pytest.fixture
def run(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run of this user. A job that imports `evil:Net` would write the file `executed`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('executed', 'w').close()\nfrom tests.train.toy import Net\n")
    return Path(shutil.copytree(written, tmp_path / "run"))


def make_foreign(run: Path) -> None:
    """Makes the job of the run import `evil`, as somebody else could who sends the folder."""
    job = yaml.safe_load((run / "job.yaml").read_text())
    job["model"]["call"] = f"{Path('evil.py').resolve()}:Net"
    (run / "job.yaml").write_text(yaml.safe_dump(job))


def refusal(run_command: RunCommand, *arguments: str) -> str:
    result = run_command(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result
    assert result.stderr.count("\n") == 1
    assert not Path("executed").exists(), "code of the run was executed"
    return result.stderr


def test_an_own_run_needs_no_trust(run: Path, run_command: RunCommand) -> None:
    assert run_command("export", str(run), "--to", "safetensors", "--limit", "0").exit_code == 0
    assert run_command("prove", "--against", str(run), str(run)).exit_code == 0
    assert (run / "against-proof-0001.json").is_file(), "docs/prove.md says that the proof is in the second run"
    moved = run.rename(run.with_name("moved"))
    assert run_command("export", str(moved), "--to", "safetensors", "--limit", "0").exit_code == 0


def test_a_run_whose_job_was_changed_is_refused_without_executing_it(run: Path, run_command: RunCommand) -> None:
    make_foreign(run)
    line = refusal(run_command, "export", "run", "--to", "safetensors")
    assert (
        "run was not signed with your key: somebody else wrote it, or it was changed, or the key is another one" in line
    )
    assert "evil.py:Net, tests.train.toy:points," in line
    assert line.endswith("which executes code; look at it and add --trust\n")
    assert "was not signed with your key" in refusal(run_command, "prove", "--against", "run", "run")
    assert run_command("export", "run", "--to", "safetensors", "--limit", "0", "--trust").exit_code == 0
    assert Path("executed").exists()


def test_a_foreign_job_that_takes_minutes_to_read_is_refused(run: Path, run_command: RunCommand) -> None:
    (run / "job.yaml").write_text(f"model: [{'1,' * 2**20}]")
    line = refusal(run_command, "export", "run", "--to", "safetensors")
    assert line == "meshwright: run/job.yaml is too large: a job file has at most 1,048,576 characters\n"


def test_prove_with_trust_compares_a_changed_run(run: Path, run_command: RunCommand) -> None:
    (run / "plan.yaml").write_text((run / "plan.yaml").read_text() + "\n")
    assert "was not signed with your key" in refusal(run_command, "prove", "--against", str(run), str(run))
    assert run_command("prove", "--against", str(run), str(run), "--trust").exit_code == 0


def test_a_run_of_an_earlier_version_needs_trust(run: Path, run_command: RunCommand) -> None:
    (run / "origin.json").unlink()
    line = refusal(run_command, "export", "run", "--to", "safetensors")
    assert line == (
        "meshwright: run has no origin.json, as runs of earlier versions, so it is unknown who wrote it: its job.yaml"
        f" imports {IMPORTS}, which executes code; look at it and add --trust\n"
    )
    assert run_command("export", "run", "--to", "safetensors", "--limit", "0", "--trust").exit_code == 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"signature": 3}', '{"signature": "x", "more": 1}', "\0" * 9, "[" * 9999]
)
def test_a_damaged_origin_is_no_origin(run: Path, run_command: RunCommand, text: str) -> None:
    (run / "origin.json").write_text(text)
    assert "run has a damaged origin.json" in refusal(run_command, "export", "run", "--to", "safetensors")


def test_a_signature_of_another_key_is_foreign(
    run: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert "was not signed with your key" in refusal(run_command, "export", "run", "--to", "safetensors")
    assert not (tmp_path / "of another user").exists(), "reading creates no key"


def test_a_team_shares_runs_with_a_key(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHWRIGHT_KEY", "of the team")
    run = recorded_run(tmp_path / "shared")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert run_command("export", str(run), "--to", "safetensors", "--limit", "0").exit_code == 0
    monkeypatch.setenv("MESHWRIGHT_KEY", "of another team")
    assert "was not signed with your key" in refusal(run_command, "export", str(run), "--to", "safetensors")


@pytest.mark.parametrize("name", ["job.yaml", "plan.yaml"])
def test_a_link_or_a_pipe_instead_of_a_file_is_refused(run: Path, run_command: RunCommand, name: str) -> None:
    (run / name).rename(run.parent / name)
    (run / name).symlink_to(run.parent / name)
    assert f"{name} cannot be read: it is a symbolic link" in refusal(run_command, "export", "run", "--to", "bf16")
    (run / name).unlink()
    os.mkfifo(run / name)
    message = f"{name} cannot be read: it is not a regular file"
    assert message in refusal(run_command, "export", "run", "--to", "bf16", "--trust")
    assert message in refusal(run_command, "prove", "--against", "run", "run")


def test_a_file_that_is_larger_than_any_job_is_not_read_whole(run: Path, run_command: RunCommand) -> None:
    (run / "job.yaml").write_bytes(b"#" * (5 * 2**20))
    message = refusal(run_command, "export", "run", "--to", "bf16", "--trust")
    assert "job.yaml has more than 4,194,304 bytes: `train` did not write it" in message


def test_prove_with_the_own_job_reads_only_data_of_the_runs(run: Path, run_command: RunCommand) -> None:
    shutil.copy(run / "job.yaml", "mine.yaml")
    (run / "origin.json").unlink()
    result = run_command("prove", "mine.yaml", "--against", "run", "run", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["equal"]
    make_foreign(run)
    line = refusal(run_command, "prove", "mine.yaml", "--against", "run", "run")
    assert "--against run: this run trains something else than the JOB: model is" in line


def test_the_link_best_leads_to_a_checkpoint_of_the_run_only(run: Path, run_command: RunCommand) -> None:
    (run / "checkpoints" / "best").symlink_to(run.parent)
    result = run_command("export", "run", "--to", "safetensors", "--step", "best")
    assert result.exit_code == 1
    assert result.stderr == "meshwright: run/checkpoints/best is no link to a checkpoint: choose one with --step\n"


def test_a_key_that_cannot_be_read_is_an_error_before_anything_is_written(
    folder: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_KEY_FILE", "none")
    assert "MESHWRIGHT_KEY_FILE: none cannot be read" in refusal(run_command, "train", "job.yaml", *ONE_RANK)
    assert not (folder / "runs").exists()
