"""Profiles some steps of a run with torch.profiler (`log.profile_steps`): one trace for each rank, in the folder
`profile` of the run, and on a GPU a memory snapshot that pytorch's memory viewer opens. Profiled steps are slower, and
the others are not."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import StorageError
from meshwright.files.storage import replacing
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.world import World
from meshwright.train.output.activity_times import SMALLEST_WINDOW, ActivityTimes
from meshwright.train.output.folder import RunFolder
from meshwright.train.torch_private import dump_memory_snapshot, record_memory_history
from meshwright.user.job_sections import Log


def trace_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json.gz"


def snapshot_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}-memory.pickle"


@contextmanager
def record_times(folder: RunFolder, heartbeat: Heartbeat, world: World, rank: int, log: Log) -> Iterator[None]:
    """Records what a rank spends its time on while the context lasts, and profiles steps as the job's `log` says.
    `rank` is the rank's number in the run."""
    times = ActivityTimes(folder.times, world, rank, max(SMALLEST_WINDOW, log.every_steps))
    heartbeat.listeners.append(times)
    profile = None
    if log.profile_steps is not None:
        profile = StepProfile(folder.profile, rank, world.device, *log.profile_steps, times)
        heartbeat.listeners.append(profile)
    try:
        yield
    finally:
        heartbeat.listeners.clear()
        if profile is not None:
            profile.close()
        times.close()


class StepProfile:
    """Listens to a rank's heartbeat, and profiles the steps from `first` up to the one before `end`. What the profiler
    takes to start and to write its files is not counted as time of the step (`times`)."""

    def __init__(
        self, folder: Path, rank: int, device: torch.device, first: int, end: int, times: ActivityTimes
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._device = device
        self._first = first
        self._end = end
        self._times = times
        self._step = -1
        self._profiler: Any = None
        self._is_over = False

    def enter(self, step: int, activity: str) -> None:
        self._step = step
        if activity == "prepare" and self._first <= step < self._end and self._profiler is None and not self._is_over:
            self._start()

    def finish_step(self) -> None:
        if self._profiler is not None and self._step + 1 >= self._end:
            self._stop()

    def close(self) -> None:
        """Writes what was profiled, if the run ended before the last profiled step."""
        if self._profiler is not None:
            self._stop()

    def _start(self) -> None:
        began = time.perf_counter()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            record_memory_history(True)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()
        self._times.exclude(time.perf_counter() - began)

    def _stop(self) -> None:
        began = time.perf_counter()
        profiler, self._profiler, self._is_over = self._profiler, None, True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        with suppress(StorageError, OSError):  # a full disk does not end the run
            self._folder.mkdir(exist_ok=True)
            with replacing(trace_file(self._folder, self._rank)) as draft:
                profiler.export_chrome_trace(str(draft))
            if self._device.type == "cuda":
                with replacing(snapshot_file(self._folder, self._rank)) as draft:
                    dump_memory_snapshot(str(draft))
        if self._device.type == "cuda":
            record_memory_history(False)
        self._times.exclude(time.perf_counter() - began)
