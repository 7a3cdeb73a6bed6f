"""`CheckpointCopies`: copies the checkpoints of a run to the URL `checkpoint.copy_to` while the run goes on, in a
thread of rank 0. What could not be copied is told at the next checkpoint and tried again with it."""

import json
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.checkpoint.copy import copied_steps, delete_copy, is_copied, read_copy, step_folders, upload_checkpoint
from meshwright.checkpoint.manifest import checkpoints_in, step_of
from meshwright.errors import CheckpointError, InputError, MeshwrightError
from meshwright.files.remote import RemoteFolder, open_remote
from meshwright.files.storage import write_atomically
from meshwright.train.output.folder import RunFolder

FIELD = "checkpoint.copy_to"
RUN = "run.json"  # the object that says which run the copies beside it are of
RUN_FILES = ("job.yaml", "plan.yaml", "device.txt", "metrics.jsonl", "shares.jsonl")
_LARGEST_RUN_BYTES = 65_536
_FIRST_WAIT_S = 1.0  # before an upload at the end of a run is tried again; the next waits are longer
_ATTEMPTS_AT_END = 3


class RunIdentity(BaseModel):
    """Which run the copies in a folder are of. `id` is a random number of 32 hexadecimal digits. `name` is the name of
    the folder of the copies: a run that continues from copies goes on under their name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern="^[0-9a-f]{32}$")
    name: str = Field(pattern=r"^[\w.-]{1,200}$")


@dataclass(frozen=True)
class _Uploaded:
    """A checkpoint that this process has copied, with the time of change of its manifest."""

    name: str
    changed_ns: int


class CheckpointCopies:
    """The copies of one run. Rank 0 has one. `lock` is held while checkpoints are deleted, and `uploading` is the name
    of the one that must not be deleted, or None."""

    def __init__(self, folder: RunFolder, url: str, keep: int) -> None:
        self.lock = threading.Lock()
        self.uploading: str | None = None
        self._folder = folder
        self._url = url
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._newest: str | None = None
        self._is_due = False  # whether checkpoints were saved since the thread looked
        self._stops = False
        self._copied: set[_Uploaded] = set()
        self._messages: list[str] = []
        self._problem: str | None = None
        self._is_claimed = False

    def begin(self, newest: str | None) -> threading.Thread:
        """Starts to copy the checkpoints up to the one named `newest`, in a thread, which is returned. None means the
        newest one that there is."""
        with self.lock:
            self._newest = newest
            self._is_due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)
                self._thread.start()
            return self._thread

    def take_messages(self) -> list[str]:
        """Returns what the user has to know since the last call."""
        with self.lock:
            messages, self._messages = self._messages, []
            return list(dict.fromkeys(messages))

    def finish(self, limit_s: float | None) -> None:
        """Waits until all is copied or has failed several times, but not longer than `limit_s`."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for attempt in range(_ATTEMPTS_AT_END):
            if attempt:
                wait_s = _FIRST_WAIT_S * 4 ** (attempt - 1)
                time.sleep(wait_s if deadline is None else max(0.0, min(wait_s, deadline - time.monotonic())))
            thread = self.begin(self._newest)
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive() or self._problem is None:
                break
        later = f"`train` with --resume {self._folder.path} copies them later"
        with self.lock:
            if thread.is_alive():
                self._stops = True
                self._messages.append(f"the newest checkpoints are not yet copied to {self._url}: {later}")
            elif self._problem:
                self._messages.append(f"the newest checkpoints are not copied to {self._url}: {later}")

    def _work(self) -> None:
        while True:
            with self.lock:
                if self._stops or not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            try:
                problem = self._copy_all()
            except Exception as error:  # none may end the run, also not a mistake of a library
                kind = "" if isinstance(error, MeshwrightError) else f"{type(error).__name__}: "
                problem = f"{kind}{error}"
            with self.lock:
                self.uploading = None
                if problem:
                    self._messages.append(f"checkpoints are not copied to {self._url}, which is tried again: {problem}")
                elif self._problem:
                    self._messages.append(f"checkpoints are copied to {self._url} again")
                self._problem = problem

    def _copy_all(self) -> str | None:
        """Copies the checkpoints that are not copied yet, from the newest to the oldest, and deletes old copies. If
        another checkpoint is saved meanwhile, it ends early. Returns the problem of a checkpoint that is damaged."""
        identity = identity_of(self._folder)
        remote = open_remote(self._url, FIELD).child(identity.name)
        if not self._is_claimed:
            claim(remote, identity)
            self._is_claimed = True
        local = checkpoints_in(self._folder.checkpoints)
        last = step_of(self._newest) if self._newest else max(local, default=None)
        if last is None:
            return None
        best = _best_name(self._folder)
        up_to_last = [path for step, path in local.items() if step <= last]
        wanted = [path for path in up_to_last if path in up_to_last[-self._keep :] or path.name == best]
        problem = None
        for path in reversed(wanted):
            try:
                self._copy(path, remote, identity)
            except CheckpointError as error:
                problem = problem or str(error)
            if self._is_due or self._stops:
                return problem or self._problem
        self._prune(remote, last, {best, *(path.name for path in wanted)})
        return problem

    def _copy(self, path: Path, remote: RemoteFolder, identity: RunIdentity) -> None:
        with self.lock:  # from now on it is not deleted
            if not path.is_dir():
                return
            self.uploading = path.name
        uploaded = _Uploaded(path.name, (path / "manifest.json").stat().st_mtime_ns)
        copy = remote.child(path.name)
        if uploaded not in self._copied and not is_copied(path, copy):
            upload_checkpoint(path, copy, identity.id, _run_files(self._folder), self._check_going_on)
        self._copied.add(uploaded)
        with self.lock:
            self.uploading = None

    def _check_going_on(self, _: int) -> None:
        if self._stops:
            raise CheckpointError("the run ends")

    def _prune(self, remote: RemoteFolder, last: int, kept: set[str | None]) -> None:
        """Deletes the copies up to the step `last`, and what is left of interrupted uploads, but not the newest ones
        and not those of checkpoints that the run still has."""
        newest = [step for step in copied_steps(remote) if step <= last][-self._keep :]
        for step, copy in step_folders(remote).items():
            if step < last and step not in newest and copy.name not in kept:
                delete_copy(copy)


def check_copies(folder: RunFolder, url: str | None) -> None:
    """Raises an `InputError` if checkpoints of this run cannot be copied to the URL of the job, before the run starts.
    Does nothing if the job has no such URL."""
    if url is None:
        return
    if url.startswith("memory://"):
        raise InputError(f"{FIELD} is {url}, which every process has for itself: name a store that outlives a process")
    identity = identity_of(folder)
    try:
        claim(open_remote(url, FIELD).child(identity.name), identity)
    except InputError:
        raise
    except MeshwrightError as error:
        raise InputError(f"{FIELD}: {error}") from None


def identity_of(folder: RunFolder) -> RunIdentity:
    """Returns under which name and number the run is copied. It is decided and stored when it is first asked for."""
    if folder.copies.exists():
        try:
            return RunIdentity.model_validate_json(folder.copies.read_bytes()[:_LARGEST_RUN_BYTES])
        except (ValidationError, OSError):
            raise InputError(f"{folder.copies} is damaged: delete it, and set another {FIELD}") from None
    identity = RunIdentity(id=secrets.token_hex(16), name=folder.path.resolve().name)
    write_atomically(folder.copies, identity.model_dump_json())
    return identity


def claim(remote: RemoteFolder, identity: RunIdentity) -> None:
    """Writes to a folder of copies which run it is for. Raises an `InputError` if it has the copies of another run,
    which would be mixed with those of this one."""
    data = remote.read(RUN, _LARGEST_RUN_BYTES)
    try:
        found = None if data is None else json.loads(data).get("id")
    except (ValueError, AttributeError, RecursionError):
        found = "unreadable"
    if found == identity.id:
        return
    if not all(_is_copy_of(identity, copy) for copy in copied_steps(remote).values()):
        raise InputError(
            f"{FIELD}: {remote.url} has checkpoints of another run: continue that run with --resume {remote.url}, or"
            f" set another {FIELD}"
        )
    remote.write(RUN, identity.model_dump_json().encode())


def _is_copy_of(identity: RunIdentity, copy: RemoteFolder) -> bool:
    try:
        return read_copy(copy).run == identity.id
    except CheckpointError:
        return False


def _best_name(folder: RunFolder) -> str | None:
    link = folder.checkpoints / "best"
    return link.readlink().name if link.is_symlink() else None


def _run_files(folder: RunFolder) -> dict[str, bytes]:
    """The small files that a run needs to go on elsewhere, as they are now."""
    files = {name: folder.path / name for name in RUN_FILES}
    contents = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    for name in ("metrics.jsonl", "shares.jsonl"):
        if name in contents:  # the last line may be only half written
            contents[name] = contents[name][: contents[name].rfind(b"\n") + 1]
    return contents
