"""`disturbed_run`: trains a job with `meshwright train`, kills its ranks, and returns what happened."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import checkpoints_in
from meshwright.errors import RankError
from meshwright.processes.environment import variables_with
from meshwright.processes.heartbeat import HeartbeatRecord
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.recovery import read_recoveries
from validation.bench.faults.leftovers import Process, descendants, find_leftovers
from validation.bench.faults.schedule import PlannedKill

_MOMENT_S = 600.0  # how long a moment may take to come
_LOOK_S = 0.2  # how often processes are looked at until the run ends


class Command(Protocol):
    """A running command, with the members of `subprocess.Popen` that are needed."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


StartCommand = Callable[[Sequence[str], Mapping[str, str], Path, Path], Command]
"""Starts `meshwright` with these arguments and environment variables. Its output goes to two files."""


@dataclass(frozen=True)
class Kill:
    """A kill that happened: which rank, where it was, and after how many restarts. `committed` is the step of the
    newest checkpoint at that time, and `resumed` the step from which the run went on; both are 0 without a checkpoint.
    `seconds` is the time from the kill to the end of the next step, and `parts` what it was spent on. All three are
    None if the ranks were killed again before they finished a step."""

    rank: int
    step: int
    during: str
    activity: str
    attempt: int
    committed: int
    resumed: int | None
    seconds: float | None
    parts: dict[str, float] | None


@dataclass(frozen=True)
class DisturbedRun:
    """A finished run: its result, the kills, the checksums of its last checkpoint, its logged losses, and what was
    left."""

    folder: RunFolder
    result: dict[str, Any]
    kills: tuple[Kill, ...]
    checksums: dict[str, str]
    losses: list[tuple[str, int, float | None]]
    leftovers: tuple[str, ...]


def start_command(words: Sequence[str], variables: Mapping[str, str], out: Path, err: Path) -> Command:
    """Starts `meshwright` as a process."""
    with out.open("w") as stdout, err.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "meshwright", *words], env=dict(variables), stdout=stdout, stderr=stderr
        )


def disturbed_run(
    words: Sequence[str],
    folder: Path,
    name: str,
    kills: Sequence[PlannedKill] = (),
    start: StartCommand = start_command,
) -> DisturbedRun:
    """Runs `meshwright` with the words of a `train` command, to which the folder of outputs is added, and kills ranks
    of it. `name` is the job's name. Raises a `RankError` if the run fails."""
    temporary, out, err = folder / "temporary", folder / "stdout", folder / "stderr"
    shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir(parents=True)
    words = [*words, "--json", "--resume", "never", "--set", f"output={folder / 'runs'}"]
    # Compiled code is not a leftover: it is cached on purpose, and serves the runs that come after.
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "compiled"), **variables_with()}
    command = start(words, {**variables, "TMPDIR": str(temporary)}, out, err)
    run = RunFolder(folder / "runs" / f"{name}-0001")
    try:
        seen, processes = _kill_ranks(command, run, kills)
        while (code := command.poll()) is None:
            processes |= descendants(command.pid)
            time.sleep(_LOOK_S)
    finally:
        if command.poll() is None:
            command.kill()
        command.wait()
    if code:
        raise RankError(f"the run in {run.path} ended with exit code {code}: {_last_line(err)}; its output: {err}")
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    leftovers = find_leftovers(processes, temporary, run.checkpoints)
    return DisturbedRun(run, result, _with_recoveries(seen, run), _checksums(run), _losses(run), tuple(leftovers))


def _kill_ranks(command: Command, run: RunFolder, kills: Sequence[PlannedKill]) -> tuple[list["_Killed"], set[Process]]:
    """Kills ranks as planned, until the run ends. Returns the kills, and all processes of the run that were seen."""
    done: list[_Killed] = []
    processes: set[Process] = set()
    for planned in kills:
        attempt = done[-1].seen.attempt + 1 if done else 0
        fault = planned.fault(attempt)
        injection = fault.inject_before_end(run, lambda: command.poll() is not None, _MOMENT_S)
        if injection is None:
            break
        # A checkpoint that another rank publishes between the kill and this line must not be lost either.
        committed = max(checkpoints_in(run.checkpoints), default=0)
        done.append(_Killed(planned, injection.seen, injection.time, committed))
        processes |= descendants(command.pid)
    return done, processes


@dataclass(frozen=True)
class _Killed:
    """A kill of which it is not known yet how the run went on."""

    planned: PlannedKill
    seen: HeartbeatRecord
    time: float
    committed: int


def _with_recoveries(killed: Sequence[_Killed], run: RunFolder) -> tuple[Kill, ...]:
    recoveries = {recovery["attempt"]: recovery for recovery in read_recoveries(run)}
    kills = []
    for kill in killed:
        recovery = recoveries.get(kill.seen.attempt + 1)
        resumed, seconds, parts = None, None, None
        if recovery is not None:
            notice = recovery["noticed"] - kill.time
            resumed, seconds = recovery["step"], notice + recovery["seconds"]
            parts = {"notice": notice, **recovery["parts"]}
        seen = kill.seen
        kills.append(
            Kill(
                kill.planned.rank,
                seen.step,
                kill.planned.during,
                seen.activity,
                seen.attempt,
                kill.committed,
                resumed,
                seconds,
                parts,
            )
        )
    return tuple(kills)


def _checksums(run: RunFolder) -> dict[str, str]:
    """Returns the checksums of the files with the weights and the optimizer's state of the last checkpoint."""
    newest = find_newest_valid(run.checkpoints)
    assert newest.manifest is not None
    files = newest.manifest.files.items()
    return {name: checksum.sha256 for name, checksum in files if name.startswith("rank-")}


def _losses(run: RunFolder) -> list[tuple[str, int, float | None]]:
    """Returns the losses of the run's metrics log, with the kind and the step of each."""
    entries = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(entry["kind"], entry["step"], entry.get("loss")) for entry in entries]


def _last_line(file: Path) -> str:
    return (file.read_text().strip().splitlines() or ["nothing was printed"])[-1]
