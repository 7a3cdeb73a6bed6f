"""What a rank records of its time, from the changes of its heartbeat."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.processes.heartbeat import Heartbeat
from meshwright.report.trace import read_trace
from meshwright.train.output import activity_times
from meshwright.train.output.activity_times import times_file
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.step_profile import record_times, trace_file
from meshwright.user.job_sections import Log
from tests.train.one_process import world


def record(
    folder: Path, steps: int, log: Log, saves: tuple[int, ...] = (), blocked_s: float = 0.0
) -> list[dict[str, Any]]:
    """Makes steps without a model, and returns the lines that were recorded."""
    heartbeat = Heartbeat.in_memory()
    with record_times(RunFolder(folder), heartbeat, world(), 0, log):
        for step in range(steps):
            for activity in ("data", "prepare", "forward", "backward", "optimizer"):
                heartbeat.update(step, activity)
                if activity == "backward":
                    WAIT_CLOCK.seconds += blocked_s
                    torch.ones(2).sum()
            heartbeat.finish_step()
            if step + 1 in saves:
                heartbeat.update(step + 1, "save")
    return [json.loads(line) for line in times_file(folder / "times", 0).read_text().splitlines()]


def test_windows_begin_after_the_first_step_and_end_at_round_numbers(tmp_path: Path) -> None:
    lines = record(tmp_path, 25, Log(every_steps=1))
    assert lines[0]["start"] == 0
    assert [(line["step"], line["steps"]) for line in lines[1:]] == [(10, 9), (20, 10), (25, 5)]
    assert set(lines[2]["seconds"]) == {"data", "prepare", "forward", "backward", "optimizer"}
    assert lines[2]["peak_bytes"] > 0


def test_the_time_blocked_in_exchanges_is_not_the_time_of_an_activity(tmp_path: Path) -> None:
    seconds = record(tmp_path, 21, Log(), blocked_s=0.5)[2]["seconds"]
    assert seconds["exchange"] == pytest.approx(5.0)
    assert seconds["backward"] < 0, "half a second that did not pass was said to be blocked"


def test_a_checkpoint_is_an_event_and_no_part_of_a_step(tmp_path: Path) -> None:
    lines = record(tmp_path, 20, Log(), saves=(10,))
    (event,) = [line for line in lines if "event" in line]
    assert (event["event"], event["step"]) == ("save", 10)
    assert all("save" not in line.get("seconds", {}) for line in lines if "steps" in line)


def test_windows_of_a_long_run_become_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_times, "WINDOWS_BEFORE_DOUBLING", 5)
    lines = record(tmp_path, 160, Log())[1:]
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60, 80, 100, 120, 160]


def test_a_folder_that_was_deleted_does_not_end_the_run(tmp_path: Path) -> None:
    heartbeat = Heartbeat.in_memory()
    with record_times(RunFolder(tmp_path / "deleted"), heartbeat, world(), 0, Log()):
        for step in range(12):
            heartbeat.update(step, "forward")
            heartbeat.finish_step()
    assert not (tmp_path / "deleted").exists()


def test_the_steps_that_the_job_names_are_profiled(tmp_path: Path) -> None:
    record(tmp_path, 6, Log(profile_steps=(2, 4)))
    events = read_trace(trace_file(tmp_path / "profile", 0))["traceEvents"]
    assert sum(event.get("name") == "aten::ones" for event in events) == 2


@pytest.mark.parametrize("steps", [(3, 3), (5, 2), (0, 5_000)])
def test_profile_steps_that_make_no_sense_are_refused(steps: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="such as \\[10, 13\\]"):
        Log(profile_steps=steps)
