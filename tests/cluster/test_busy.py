"""Measurements that other programs disturb are marked, said in words, and repeated once the programs have ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshwright.cluster import busy, detect
from meshwright.cluster.busy import OtherPrograms, busy_sentence, is_idle_now
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.cores import usable_cores
from meshwright.cluster.detect import find_cluster
from tests.cluster.test_detect import measured

TICKS = os.sysconf("SC_CLK_TCK")


def write_counts(file: Path, busy_s: float) -> None:
    """Writes the kernel's file of a machine that was busy for so many core seconds, half of them stolen by its host."""
    ticks = round(busy_s * TICKS / 2)
    file.write_text(f"cpu  {ticks} 0 0 123456 789 0 0 {ticks} 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A machine with four cores, on which the present time and this process's own seconds are those of the list."""
    now = [100.0, 7.0]
    times = os.times()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "times", lambda: type(times)((now[1] / 2, 0.0, now[1] / 4, now[1] / 4, 0.0)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(busy, "usable_cores", lambda: 4)
    return now


@pytest.mark.parametrize(
    ("machine_s", "own_s", "usable", "cores"),
    [
        (20.0, 20.0, 4, 0.0),  # only this process computes
        (30.0, 20.0, 4, 1.0),
        (23.0, 20.0, 4, 0.0),  # too little to matter
        (40.0, 0.0, 4, 4.0),
        (30.0, 20.0, 3, 0.0),  # the others have a core of their own
        (40.0, 20.0, 3, 1.0),
    ],
)
def test_other_programs_are_counted_without_this_one(
    machine_s: float, own_s: float, usable: int, cores: float, clock: list[float], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(busy, "usable_cores", lambda: usable)
    write_counts(tmp_path / "stat", 1000.0)
    others = OtherPrograms(tmp_path / "stat")
    clock[0], clock[1] = clock[0] + 10, clock[1] + own_s
    write_counts(tmp_path / "stat", 1000.0 + machine_s)
    assert others.cores() == pytest.approx(cores, abs=0.01)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2", "intr 1 2 3 4 5 6 7 8 9"])
def test_without_the_kernels_counts_nothing_is_marked(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert OtherPrograms(tmp_path / "stat").cores() == 0


def test_programs_that_really_compute_are_seen() -> None:
    """As many programs as there are cores compute, while this process waits."""
    if not Path("/proc/stat").exists():
        pytest.skip("the kernel does not count what programs compute")
    command = [sys.executable, "-c", "print('begun', flush=True)\nwhile True: pass"]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == b"begun\n"
        assert not is_idle_now()
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_a_disturbed_measurement_is_said_and_repeated_once_the_machine_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    states = iter([1.5, 0.0])
    is_idle = [False]
    monkeypatch.setattr(detect, "is_idle_now", lambda: is_idle[0])

    def measure(cluster: Cluster) -> Cluster:
        return measured(cluster).model_copy(update={"busy_cores": next(states)})

    disturbed = find_cluster("local", measure)
    assert disturbed.busy_cores == 1.5
    assert f"1.5 of {usable_cores()} cores" in (busy_sentence(disturbed) or "")
    assert disturbed.basis == f"measured, while other programs used 1.5 of {usable_cores()} cores"
    assert find_cluster("2xcpu", measure).busy_cores == 1.5, "the other programs still run"
    is_idle[0] = True
    assert find_cluster("local") == disturbed, "who does not measure gets what there is"
    again = find_cluster("local", measure)
    assert (again.busy_cores, busy_sentence(again), again.basis) == (0.0, None, "measured")
    assert find_cluster("local", measure) == again
