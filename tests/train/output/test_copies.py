"""Copies of a run's checkpoints at a URL: what is there and when, what happens if the store fails, and that a run goes
on from them bitwise as from its own checkpoints."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from meshwright.checkpoint.copy import COPY, copied_steps, delete_copy, download_checkpoint, read_copy
from meshwright.checkpoint.manifest import FileChecksum, signed_text
from meshwright.checkpoint.reader import VerifiedCheckpoints
from meshwright.errors import CheckpointError, InputError, MeshwrightError, RemoteStorageError, StorageError
from meshwright.files.remote import RemoteFolder, open_remote
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.output import checkpoints, copies
from meshwright.train.output.copies import CheckpointCopies, check_copies
from meshwright.train.output.folder import RunFolder, find_run_to_resume, write_job_and_plan
from meshwright.train.output.remote_run import local_run
from tests.train.one_process import EVALUATED, equal_states, session_of, toy_job, train


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path}/store"


def job_for(tmp_path: Path, url: str | None, **checkpoint: Any) -> Job:
    options = {"every_steps": 2, "keep": 2, "copy_to": url, **checkpoint}
    return toy_job(checkpoint=options, output=str(tmp_path / "runs"), **EVALUATED)


def run_folder(job: Job, number: int = 1) -> RunFolder:
    """Creates a run folder as `train` does."""
    folder = RunFolder(Path(job.output) / f"toy-{number:04d}")
    folder.path.mkdir(parents=True)
    folder.logs.mkdir()
    write_job_and_plan(folder, job, Plan())
    return folder


def stopped_run(tmp_path: Path, url: str, stop_after: int = 6, **checkpoint: Any) -> tuple[Job, RemoteFolder]:
    """Trains some steps, then loses the machine's folder. Returns the job and the folder of the copies."""
    job = job_for(tmp_path, url, **checkpoint)
    train(job, run_folder(job).path, stop_after=stop_after)
    shutil.move(tmp_path / "runs", tmp_path / "lost")
    return job, open_remote(url, "test").child("toy-0001")


def test_a_run_goes_on_from_its_copies_to_the_same_weights(tmp_path: Path, url: str) -> None:
    job, remote = stopped_run(tmp_path, url, best="accuracy")
    assert [*copied_steps(remote)] == [5, 6]
    lines: list[str] = []
    folder = RunFolder(Path(local_run(job, remote.url, lines.append)))
    assert folder.path == tmp_path / "runs" / "toy-0001"
    assert lines == [f"downloaded {remote.url}/step-00000006 to {folder.path}"]
    assert find_run_to_resume(job, str(folder.path)) == folder
    resumed, whole = train(job, folder.path), train(job_for(tmp_path, None), tmp_path / "whole")
    assert resumed.session.steps == whole.session.steps == 10
    assert equal_states(session_of(resumed).module.state_dict(), session_of(whole).module.state_dict())
    assert resumed.best is not None
    assert (folder.checkpoints / "best").resolve().is_dir()
    evaluations = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines() if '"eval"' in line]
    assert evaluations == [5, 10]
    assert [*copied_steps(remote)][-2:] == [8, 10]  # it goes on under the same name
    folder.result.unlink()
    assert local_run(job, remote.url, lines.append) == str(folder.path)
    assert "which is as far" in lines[-1]


def test_old_copies_are_deleted_and_unfinished_ones_do_not_exist(tmp_path: Path, url: str) -> None:
    remote = open_remote(url, "test").child("toy-0001")
    remote.child("step-00000003").write("rank-00000.bin", b"of an interrupted upload")
    assert copied_steps(remote) == {}
    _, remote = stopped_run(tmp_path, url, stop_after=9)
    assert remote.names() == ["run.json", "step-00000008", "step-00000009"]
    assert [*copied_steps(remote)] == [8, 9]


def test_copy_json_is_written_last_and_deleted_first(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actions: list[tuple[str, str, str]] = []

    def recorded(action: str, name_at: int) -> None:
        original: Callable[..., Any] = getattr(RemoteFolder, action)

        def record(folder: RemoteFolder, *arguments: Any) -> Any:
            if folder.name.startswith("step-"):
                actions.append((folder.name, action, str(arguments[name_at]) if arguments else ""))
            return original(folder, *arguments)

        monkeypatch.setattr(RemoteFolder, action, record)

    for action, name_at in (("upload", 1), ("write", 0), ("delete", 0), ("delete_all", 0)):
        recorded(action, name_at)
    stopped_run(tmp_path, url, stop_after=6, keep=1)
    of_first = [(action, name) for step, action, name in actions if step == "step-00000006"]
    assert of_first[0] == ("delete", COPY)
    assert of_first[-1] == ("write", COPY)
    assert {name for _, name in of_first[1:-1]} >= {"index.json", "manifest.json", "rank-00000.bin", "job.yaml"}
    deletions = [(action, name) for step, action, name in actions if step != "step-00000006"][-2:]
    assert deletions == [("delete", COPY), ("delete_all", "")]


def test_a_checkpoint_that_is_being_copied_is_not_deleted(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_three = threading.Event()
    was_kept: list[bool] = []
    prune, upload = checkpoints.prune, RemoteFolder.upload

    def noted_prune(folder: Path, keep: int, newest: str, *also: str | None, verified: VerifiedCheckpoints) -> None:
        prune(folder, keep, newest, *also, verified=verified)
        if newest == "step-00000006":
            was_kept.append((folder / "step-00000002").is_dir())
            saved_three.set()

    def slow_upload(*arguments: Any) -> tuple[int, str]:
        assert saved_three.wait(100)
        return upload(*arguments)

    monkeypatch.setattr(checkpoints, "prune", noted_prune)
    monkeypatch.setattr(RemoteFolder, "upload", slow_upload)
    _, remote = stopped_run(tmp_path, url, stop_after=7, keep=1)
    assert was_kept == [True]
    assert [*copied_steps(remote)] == [7]


def test_a_store_that_fails_is_told_and_tried_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(tmp_path, None)
    folder = run_folder(job)
    train(job, folder.path, stop_after=6)
    run_copies = CheckpointCopies(folder, url, keep=2)
    remote = open_remote(url, "test").child("toy-0001")
    opened, monkeypatched = MemoryFileSystem._open, monkeypatch.setattr

    def gone(*_: Any, **__: Any) -> Any:
        raise OSError("the bucket\nis gone")

    def gone_for_one_file(system: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if path.endswith("rank-00000.bin"):
            raise OSError("the bucket is gone")
        return opened(system, path, *arguments, **options)

    for failure in (gone, gone_for_one_file):
        monkeypatched(MemoryFileSystem, "_open", failure)
        run_copies.begin("step-00000006").join()
        (message,) = run_copies.take_messages()
        assert message.startswith(f"checkpoints are not copied to {url}, which is tried again: memory://")
        assert "OSError: the bucket" in message
        assert copied_steps(remote) == {}
    monkeypatched(copies, "_FIRST_WAIT_S", 0)
    run_copies.finish(None)
    assert "are not copied" in run_copies.take_messages()[-1]
    monkeypatched(MemoryFileSystem, "_open", opened)
    run_copies.finish(None)
    assert run_copies.take_messages() == [f"checkpoints are copied to {url} again"]
    assert [*copied_steps(remote)] == [4, 6]
    remote.delete(copies.RUN)  # the copies say as well of which run they are
    remote.child("step-00000004").delete(COPY)  # what another process has deleted is copied again
    CheckpointCopies(folder, url, keep=2).begin(None).join()
    assert [*copied_steps(remote)] == [4, 6]


def test_a_run_that_fails_to_copy_goes_on(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise RemoteStorageError("gone")

    monkeypatch.setattr(copies, "upload_checkpoint", gone)
    monkeypatch.setattr(copies, "_FIRST_WAIT_S", 0)
    job = job_for(tmp_path, url)
    assert train(job, run_folder(job).path).session.steps == 10
    error = capfd.readouterr().err
    assert f"checkpoints are not copied to {url}, which is tried again: gone" in error
    assert f"the newest checkpoints are not copied to {url}: `train` with --resume" in error


# ---- damage, and stores of somebody else


def change(remote: RemoteFolder, step: int, **fields: Any) -> None:
    """Writes a copy.json with right checksums in which some fields are changed."""
    copy = remote.child(f"step-{step:08d}")
    contents = {**read_copy(copy).model_dump(), **fields}
    copy.write(COPY, signed_text(contents).encode())


@pytest.mark.parametrize("name", ["rank-00000.bin", "index.json", "manifest.json", "job.yaml", COPY])
@pytest.mark.parametrize("damage", ["missing", "changed", "cut"])
def test_a_damaged_copy_is_named_and_the_one_before_is_used(
    tmp_path: Path, url: str, name: str, damage: str, copied_run: tuple[Job, RemoteFolder]
) -> None:
    job, remote = copied_run
    newest = remote.child("step-00000006")
    contents = newest.read(name, 10**6)
    assert contents is not None
    newest.delete(name)
    if damage != "missing":
        changed = contents[:-1] if damage == "cut" else bytes([contents[0] ^ 1]) + contents[1:]
        newest.write(name, changed)
    lines: list[str] = []
    folder = Path(local_run(job, remote.url, lines.append))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"]
    if (name, damage) != (COPY, "missing"):  # then it does not exist
        assert lines[0].startswith(f"checkpoint left out: {newest.url}: ")
        assert name in lines[0]


@pytest.fixture
def copied_run(tmp_path: Path, url: str) -> tuple[Job, RemoteFolder]:
    return stopped_run(tmp_path, url)


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b", "..", "", COPY])
def test_names_that_lead_elsewhere_are_refused(copied_run: tuple[Job, RemoteFolder], name: str) -> None:
    _, remote = copied_run
    change(remote, 6, files={name: FileChecksum(bytes=1, sha256="0" * 64).model_dump()})
    with pytest.raises(CheckpointError, match="is not the name of a file of a checkpoint"):
        read_copy(remote.child("step-00000006"))


def test_a_huge_size_asks_for_no_space(copied_run: tuple[Job, RemoteFolder], tmp_path: Path) -> None:
    _, remote = copied_run
    copy = remote.child("step-00000006")
    files = {name: file.model_dump() for name, file in read_copy(copy).files.items()}
    change(remote, 6, files={**files, "rank-00000.bin": {"bytes": 10**18, "sha256": "0" * 64}})
    with pytest.raises(CheckpointError, match=r"rank-00000.bin has \d+ bytes, its copy.json says 1000000000000000000"):
        download_checkpoint(copy, read_copy(copy), tmp_path / "new", frozenset())
    assert not (tmp_path / "new").exists()


def test_a_disk_without_space_is_named(
    copied_run: tuple[Job, RemoteFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, remote = copied_run
    monkeypatch.setattr(RemoteFolder, "size", lambda *_: 10**18)
    copy = remote.child("step-00000006")
    sizes = {name: {"bytes": 10**18, "sha256": "0" * 64} for name in read_copy(copy).files}
    change(remote, 6, files=sizes)
    with pytest.raises(StorageError, match="is full"):
        download_checkpoint(copy, read_copy(copy), tmp_path / "new", frozenset())


def test_copies_of_another_run_are_not_mixed(copied_run: tuple[Job, RemoteFolder]) -> None:
    job, remote = copied_run
    with pytest.raises(InputError, match=r"toy-0001 has checkpoints of another run: continue that run with --resume"):
        copies.claim(remote, copies.identity_of(run_folder(job)))
    for copy in copied_steps(remote).values():
        delete_copy(copy)
    copies.claim(remote, copies.identity_of(RunFolder(Path(job.output) / "toy-0001")))


def test_a_key_refuses_copies_without_signature(
    copied_run: tuple[Job, RemoteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, remote = copied_run
    monkeypatch.setenv("MESHWRIGHT_KEY", "secret")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* can be used: .* is not signed"):
        local_run(job, remote.url, lambda line: None)
    assert list(Path(job.output).iterdir()) == []


def test_wrong_urls_to_resume_are_answered_with_what_to_write(copied_run: tuple[Job, RemoteFolder], url: str) -> None:
    job, remote = copied_run
    for wrong, answer in ((url, f"name one of {remote.url}"), (f"{url}/none", "name the folder of a run's copies")):
        with pytest.raises(InputError, match=answer):
            local_run(job, wrong, lambda line: None)
    other = toy_job(train={"global_batch": 25}, checkpoint={}, output=job.output, **EVALUATED)
    with pytest.raises(InputError, match=r"that run trains something else: train.global_batch is 10 there and 25 here"):
        local_run(other, remote.url, lambda line: None)
    assert list(Path(job.output).iterdir()) == []
    assert local_run(job, "auto", lambda line: None) == "auto"


def test_a_job_is_refused_before_it_starts_if_it_cannot_be_copied(tmp_path: Path) -> None:
    job = job_for(tmp_path, f"file://{tmp_path}/file/store")
    folder = run_folder(job)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"checkpoint.copy_to: file://.*cannot"):
        check_copies(folder, job.checkpoint.copy_to)
    with pytest.raises(InputError, match="which every process has for itself"):
        check_copies(folder, "memory://a")
    with pytest.raises(MeshwrightError, match=r"checkpoint.copy_to: the URL has a user or password") as refused:
        job_for(tmp_path, "s3://user:hunter2@bucket")
    assert "hunter2" not in str(refused.value)
