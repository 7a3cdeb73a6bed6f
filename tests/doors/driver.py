"""`train`: starts a script through a door of Meshwright, kills it at random moments, and starts it again as its user
would, until it ends."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.doors.training import STEPS
from tests.forking.environment import REPOSITORY
from tests.processes.nodes.ports import free_port
from validation.bench.faults.leftovers import Process, descendants, find_leftovers

LIMIT_S = 240.0  # for a start, or for what follows a kill, on a busy machine
RANKS = 2
MOST_STEPS = 12  # between a start and the next kill
MOST_START_S = 4.0
STARTS = 0.25  # the share of kills that come before the first step
_POLL_S = 0.02
_LOOK_S = 0.5  # how often new processes are looked for


@dataclass(frozen=True)
class Door:
    """How a script is started; "PORT" in `words` is a free port. `kills_launcher`: a kill may also hit the process that
    has started the ranks, if it is none of them. `replaces_ranks`: the launcher starts a rank that was killed again."""

    words: tuple[str, ...]
    script: str
    options: tuple[str, ...] = ()
    kills_launcher: bool = True
    replaces_ranks: bool = False

    def command(self, folder: Path) -> list[str]:
        words = [word.replace("PORT", str(free_port())) for word in self.words]
        return [sys.executable, *words, str(Path(__file__).with_name(self.script)), str(folder), *self.options]


@dataclass
class Training:
    """What a training did: its weights; for each kill who was hit and how many finished steps had to be repeated; and
    problems, such as a step before a checkpoint that was repeated."""

    weights: str = ""
    kills: list[str] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def train(door: Door, folder: Path, kills: int = 0, seed: int = 0) -> Training:
    folder.mkdir(parents=True)
    return _Driver(door, folder, random.Random(seed), kills).run()


class _Driver:
    def __init__(self, door: Door, folder: Path, chance: random.Random, kills: int) -> None:
        self.door, self.folder, self.chance, self.kills = door, folder, chance, kills
        self.training = Training()
        self.processes: set[Process] = set()

    def run(self) -> Training:
        while True:
            code = self._life()
            lines = self._lines()
            if code == 0 or self.training.problems:
                break
        self._check(lines)
        self.training.weights = lines[-1] if lines and lines[-1].startswith("weights") else ""
        return self.training

    def _life(self) -> int:
        """Starts the script, and returns its exit code; 0 if it has ended by itself."""
        killed = len(self.training.kills)
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                self.door.command(self.folder),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        try:
            while len(self.training.kills) < self.kills and process.poll() is None:
                if not self._kill(process) or not self.door.replaces_ranks:
                    break
            self._wait(lambda: process.poll() is not None, process)
        finally:
            process.kill()
            code = process.wait()
        if left := find_leftovers(self.processes, None):
            self.training.problems += left
            for one in self.processes:
                if one.is_alive():
                    os.kill(one.pid, signal.SIGKILL)
        if code and len(self.training.kills) == killed:
            self.training.problems.append(f"exit code {code} without a kill: {self._log()}")
        return code

    def _kill(self, process: "subprocess.Popen[bytes]") -> bool:
        """Kills a rank or the launcher at a random moment; returns False if the training has ended before it."""
        before = len(self._lines())
        if self.chance.random() < STARTS and not self._trains(process):
            seconds = self.chance.uniform(0, MOST_START_S)
            moment = f"{seconds:.2f} s after a start"
            self._wait_s(seconds, process)
        else:
            steps = self.chance.randint(1, MOST_STEPS)
            moment = f"{steps} steps after a start"
            self._wait(lambda: self._steps(before) >= steps or process.poll() is not None, process)
            self._wait_s(self.chance.uniform(0, 0.05), process)
        pid = self.chance.choice(self._victims(process.pid))
        self.processes |= descendants(process.pid)
        if process.poll() is not None:
            return False
        lines = self._lines()
        os.kill(pid, signal.SIGKILL)
        self.training.kills.append(f"{'the launcher' if pid == process.pid else 'a rank'} {moment}: {lines[-1:]}")
        if self.door.replaces_ranks and pid != process.pid:
            began = self._count("began")
            self._wait(lambda: self._count("began") > began or process.poll() is not None, process)
        return True

    def _victims(self, launcher: int) -> list[int]:
        """The launcher in a third of the kills, otherwise the ranks, or what is there before ranks say who they are."""
        if self.door.kills_launcher and self.chance.random() < 1 / (RANKS + 1):
            return [launcher]
        started = [] if self.door.kills_launcher else sorted(one.pid for one in descendants(launcher))
        return self._ranks() or started or [launcher]

    def _trains(self, process: "subprocess.Popen[bytes]") -> bool:
        """Whether this start of the launcher has trained already."""
        return self.door.replaces_ranks and any(one.pid in self._ranks() for one in descendants(process.pid))

    def _ranks(self) -> list[int]:
        """The ranks that run now. Files of an earlier start name processes that are gone."""
        mine = {one.pid for one in descendants(os.getpid())}
        pids = [int(file.read_text() or 0) for file in self.folder.glob("rank-*")]
        return [pid for pid in pids if pid in mine]

    def _wait(self, condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
        deadline, look = time.monotonic() + LIMIT_S, 0.0
        while not condition():
            if time.monotonic() > look:
                self.processes |= descendants(process.pid)
                look = time.monotonic() + _LOOK_S
            if time.monotonic() > deadline:
                self.training.problems.append(f"hangs: {self._log()}")
                process.kill()
                return
            time.sleep(_POLL_S)

    def _wait_s(self, seconds: float, process: "subprocess.Popen[bytes]") -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            time.sleep(_POLL_S)

    def _lines(self) -> list[str]:
        file = self.folder / "progress"
        return file.read_text().splitlines() if file.exists() else []

    def _steps(self, before: int) -> int:
        return sum(line.startswith("step") for line in self._lines()[before:])

    def _count(self, word: str) -> int:
        return sum(line.startswith(word) for line in self._lines())

    def _log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

    def _check(self, lines: list[str]) -> None:
        """A start begins at the newest checkpoint or later, and makes every step after it once."""
        saved = step = 0
        for line in lines:
            word, _, number = line.partition(" ")
            if word == "began":
                self.training.repeated.append(step - int(number))
                if int(number) < saved:
                    self.training.problems.append(f"began at {number}, but a checkpoint has {saved}")
                step = int(number)
            elif word == "step":
                if int(number) != step + 1:
                    self.training.problems.append(f"step {number} after step {step}")
                step = int(number)
            elif word == "saved":
                saved = int(number)
        if step != STEPS:
            self.training.problems.append(f"ended at step {step}: {self._log()}")
