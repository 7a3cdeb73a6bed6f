"""Reads what a run folder records, without executing anything of it, also while the run goes on. Lines that cannot be
read are left out: a process may have been killed while it wrote them."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.files.foreign import json_lines, parse_json, read_bytes
from meshwright.files.regular_file import open_regular_file
from meshwright.files.yaml_file import parse_mapping
from meshwright.job import load_plan
from meshwright.numbers.limits import is_number
from meshwright.plan import Plan
from meshwright.processes.heartbeat import HeartbeatRecord, heartbeat_file, read_heartbeat
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.origin import read_run_file

_LOG_TAIL_BYTES = 16 * 1024
_LOG_LINES = 40
_RUNS_WITHIN_S = 120.0  # a run whose newest heartbeat is older counts as stopped
MOST_RANKS = 100_000


@dataclass(frozen=True)
class Window:
    """Some steps of a rank, up to `step`. `seconds` are those of all its steps, by activity; `device_seconds` those of
    one step on a GPU."""

    step: int
    steps: int
    time: float
    seconds: Mapping[str, float]
    peak_bytes: int
    device_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """A start of a rank, or a checkpoint, an evaluation or a load with its duration. `time` is when it began."""

    kind: str
    step: int
    time: float
    seconds: float = 0.0
    attempt: int = 0
    host: str = ""
    device: str = ""


@dataclass(frozen=True)
class RankTimes:
    """What a rank has recorded of its time, in the order of writing."""

    windows: tuple[Window, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class RunRecord:
    """Everything that a page shows of a run. `result` is None if the run is not finished, and `heartbeat_s` the time of
    the newest heartbeat; 0 without one."""

    folder: RunFolder
    job: Mapping[str, Any]
    plan: Plan | None
    device: str
    metrics: tuple[Mapping[str, Any], ...]
    ranks: Mapping[int, RankTimes]
    heartbeats: Mapping[int, HeartbeatRecord]
    heartbeat_s: float
    result: Mapping[str, Any] | None
    page: Mapping[str, Any]
    log_lines: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def state(self) -> str:
        """`finished`, `running` or `not finished`. Whether a process runs can be seen only on its own machine; for
        other machines, a recent heartbeat counts."""
        if self.result is not None:
            return "finished"
        is_recent = time.time() - self.heartbeat_s < _RUNS_WITHIN_S
        hosts = {event.host for times in self.ranks.values() for event in times.events if event.kind == "start"}
        is_here = hosts == {socket.gethostname()}
        is_gone = is_here and not any(_is_process(beat.pid) for beat in self.heartbeats.values())
        return "running" if is_recent and not is_gone else "not finished"

    @property
    def step(self) -> int:
        """The last step that is known of."""
        steps = [int(entry["step"]) for entry in self.metrics[-1:]]
        steps += [beat.step for beat in self.heartbeats.values()]
        return max(steps, default=0)

    @property
    def began(self) -> float:
        """When the run began, in seconds since the epoch; 0 if nothing was recorded."""
        times = [event.time for rank in self.ranks.values() for event in rank.events[:1]]
        times += [float(entry["time"]) for entry in self.metrics[:1]]
        return min(times, default=0.0)

    def entries(self, kind: str) -> list[Mapping[str, Any]]:
        """The lines of metrics.jsonl of one kind: `train`, `eval`, `skipped`, …"""
        return [entry for entry in self.metrics if entry["kind"] == kind]


def read_run(path: Path) -> RunRecord:
    """Returns the record of a run folder. Raises an `InputError` if it is none."""
    folder = RunFolder(path)
    if not path.is_dir():
        raise InputError(
            f"{path}: there is no such folder: name a run folder that `train` wrote, such as runs/mnist-0001"
        )
    job = parse_mapping(read_run_file(folder.job), folder.job, "job")
    heartbeats, newest = _read_heartbeats(folder)
    return RunRecord(
        folder,
        job,
        _read_plan(folder),
        _content(folder.device).decode(errors="replace").strip(),
        tuple(entry for entry in _json_lines(folder.metrics) if _is_metric(entry)),
        _read_times(folder.times),
        heartbeats,
        newest,
        _json_object(folder.result),
        _json_object(folder.page) or {},
        _log_tail(folder.logs),
    )


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        pass
    return True


def _read_plan(folder: RunFolder) -> Plan | None:
    try:
        return load_plan(folder.plan, text=read_run_file(folder.plan))
    except MeshwrightError:
        return None


def _read_heartbeats(folder: RunFolder) -> tuple[dict[int, HeartbeatRecord], float]:
    """Returns the heartbeats by rank, and the time of the newest one."""
    heartbeats, newest = {}, 0.0
    for rank in _ranks_in(folder.logs, "rank-*.heartbeat"):
        file = heartbeat_file(folder.logs, rank)
        record = read_heartbeat(file)
        if record is not None:
            heartbeats[rank] = record
            newest = max(newest, os.stat(file).st_mtime)
    return heartbeats, newest


def _ranks_in(folder: Path, pattern: str) -> list[int]:
    names = (file.stem.removeprefix("rank-") for file in folder.glob(pattern))
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii() and int(name) < MOST_RANKS)


def _read_times(folder: Path) -> dict[int, RankTimes]:
    ranks = {}
    for rank in _ranks_in(folder, "rank-*.jsonl"):
        windows: list[Window] = []
        events: list[Event] = []
        for line in _json_lines(folder / f"rank-{rank}.jsonl"):
            try:
                _add_line(line, windows, events)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue
        ranks[rank] = RankTimes(tuple(windows), tuple(events))
    return ranks


def _add_line(line: Mapping[str, Any], windows: list[Window], events: list[Event]) -> None:
    step, moment = int(line["step"]), float(line["time"])
    if "start" in line:
        event = Event("start", step, moment, 0.0, int(line["start"]), str(line["host"]), str(line["device"]))
        events.append(event)
    elif "event" in line:
        events.append(Event(str(line["event"]), step, moment, float(line["seconds"])))
    else:
        seconds, device_seconds = line["seconds"], line.get("device_seconds", {})
        if not all(isinstance(value, float | int) for value in (*seconds.values(), *device_seconds.values())):
            raise ValueError("seconds are numbers")
        windows.append(
            Window(step, max(1, int(line["steps"])), moment, seconds, int(line["peak_bytes"]), device_seconds)
        )


def _is_metric(entry: Mapping[str, Any]) -> bool:
    numbers: list[Any] = [entry.get("step"), entry.get("time")]
    return isinstance(entry.get("kind"), str) and all(is_number(number) and isfinite(number) for number in numbers)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return json_lines(_content(path))


def _json_object(path: Path) -> dict[str, Any] | None:
    try:
        value = parse_json(_content(path) or b"null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _content(path: Path) -> bytes:
    """The content of a file; empty if there is none that can be read."""
    try:
        return read_bytes(path)
    except (OSError, ValueError):
        return b""


def _log_tail(folder: Path) -> tuple[str, ...]:
    """The last lines of the log of the lowest rank that has one."""
    for rank in _ranks_in(folder, "rank-*.log"):
        try:
            with open_regular_file(folder / f"rank-{rank}.log", follow_link=False) as stream:
                stream.seek(0, os.SEEK_END)
                stream.seek(max(0, stream.tell() - _LOG_TAIL_BYTES))
                text = stream.read().decode(errors="replace")
        except OSError:
            continue
        if text.strip():
            return tuple(text.splitlines()[-_LOG_LINES:])
    return ()
