"""`--resume URL`: brings a run that was copied to a URL (`checkpoint.copy_to`) into a new run folder, from which it
goes on like a run of this machine."""

import shutil
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.copy import (
    CopyManifest,
    copied_steps,
    download_checkpoint,
    read_copy,
    read_run_file_of,
)
from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import Manifest, checkpoint_name
from meshwright.checkpoint.reader import verify
from meshwright.checkpoint.save import WRITING
from meshwright.errors import CheckpointError, InputError, StorageError
from meshwright.files.remote import RemoteFolder, is_url, open_remote
from meshwright.files.storage import write_atomically
from meshwright.job import Job
from meshwright.train.output.copies import RUN_FILES, RunIdentity, identity_of
from meshwright.train.output.folder import RunFolder, create_folder, runs_of, why_not_resumed

_MOST_NAMED_RUNS = 10


def local_run(job: Job, resume: str, tell: Callable[[str], None]) -> str:
    """Returns what `lock_run_folder` resumes. If `resume` is a URL, that is the folder into which the newest whole
    checkpoint there was downloaded, or the folder of the same run on this machine if it is as far. `tell` shows a line
    to the user. Any other value is returned as it is."""
    if not is_url(resume):
        return resume
    remote = open_remote(resume, "--resume")
    copies = list(reversed(copied_steps(remote).items()))
    if not copies:
        raise InputError(f"--resume {remote.url}: there is no checkpoint{_other_runs(remote)}")
    here = _run_on_this_machine(job, copies[0][1])
    if here is not None:
        tell(f"{remote.url} is a copy of {here.path}, which is as far: resuming there")
        return str(here.path)
    locked = create_folder(Path(job.output), job.name)
    try:
        _download_newest(job, remote, [folder for _, folder in copies], locked.folder, tell)
    except BaseException:
        shutil.rmtree(locked.folder.path, ignore_errors=True)
        raise
    finally:
        locked.lock.close()
    return str(locked.folder.path)


def _other_runs(remote: RemoteFolder) -> str:
    """The end of an error message: the URLs of runs that are in the folder, if it is a folder of runs."""
    runs = [name for name in remote.names()[:1000] if copied_steps(remote.child(name))][:_MOST_NAMED_RUNS]
    named = ", ".join(f"{remote.url}/{name}" for name in runs)
    return f", but there are runs: name one of {named}" if runs else ": name the folder of a run's copies"


def _run_on_this_machine(job: Job, newest: RemoteFolder) -> RunFolder | None:
    """Returns the unfinished run folder of the same run, if its newest valid checkpoint is as new as the newest
    copy."""
    try:
        manifest = read_copy(newest)
    except CheckpointError:
        return None
    for folder in reversed(runs_of(Path(job.output), job.name)):
        if folder.result.exists() or not folder.copies.exists() or identity_of(folder).id != manifest.run:
            continue
        found = find_newest_valid(folder.checkpoints).manifest
        if found is not None and found.step >= manifest.step:
            return folder
    return None


def _download_newest(
    job: Job, remote: RemoteFolder, copies: list[RemoteFolder], folder: RunFolder, tell: Callable[[str], None]
) -> None:
    """Fills a new run folder from the first of these copies that is whole. Raises a `CheckpointError` if none is."""
    problems: list[str] = []
    folder.checkpoints.mkdir()
    folder.logs.mkdir()
    for copy in copies:
        try:
            copied = read_copy(copy)
            run_files = _read_run_files(copy, copied)
            for name, contents in run_files.items():
                write_atomically(folder.path / name, contents)
            reason = why_not_resumed(job, folder)
            if reason:
                raise InputError(f"--resume {remote.url}: {reason}")
            manifest = _download(copy, copied, folder.checkpoints)
        except CheckpointError as error:
            problems.append(str(error))
            tell(f"checkpoint left out: {error}")
            continue
        identity = RunIdentity(id=copied.run, name=remote.name)
        write_atomically(folder.copies, identity.model_dump_json())
        tell(f"downloaded {copy.url} to {folder.path}")
        _download_best(remote, manifest, folder, tell)
        return
    raise CheckpointError(f"none of the {len(problems)} checkpoints in {remote.url} can be used: {problems[0]}")


def _read_run_files(copy: RemoteFolder, copied: CopyManifest) -> dict[str, bytes]:
    files = {name: read_run_file_of(copy, copied, name) for name in RUN_FILES}
    for name in ("job.yaml", "plan.yaml"):
        if files[name] is None:
            raise CheckpointError(f"{copy.url}: {name} is missing")
    return {name: contents for name, contents in files.items() if contents is not None}


def _download(copy: RemoteFolder, copied: CopyManifest, checkpoints: Path) -> Manifest:
    """Downloads and verifies a checkpoint, and returns its manifest."""
    temporary = checkpoints / f"{WRITING}{copy.name}"
    try:
        download_checkpoint(copy, copied, temporary, frozenset(RUN_FILES))
        manifest = verify(temporary)
        if manifest.step != copied.step:
            raise CheckpointError(f"{copy.url}: its checkpoint is {checkpoint_name(manifest.step)}")
        temporary.rename(checkpoints / copy.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _download_best(remote: RemoteFolder, newest: Manifest, folder: RunFolder, tell: Callable[[str], None]) -> None:
    """Downloads the best checkpoint too, if the run has one. Without it, the run can go on."""
    best = newest.about["best"]
    if best is None:
        return
    name = checkpoint_name(int(best[0]))
    try:
        if not (folder.checkpoints / name).exists():
            copy = remote.child(name)
            _download(copy, read_copy(copy), folder.checkpoints)
        (folder.checkpoints / "best").symlink_to(name)
    except (CheckpointError, StorageError) as error:
        tell(f"the best checkpoint is not downloaded: {error}")
