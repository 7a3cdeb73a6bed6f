"""What one measurement asks of its processes, and what each of them answers, as JSON files in the folder of the
measurement."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.bench.strategies.time_samples import Sample

Loop = Literal["session", "plain", "data parallel", "servers"]


@dataclass(frozen=True)
class MeasurementRequest:
    """One measurement of a strategy.

    loop           which training loop runs the steps: a session under the plan, a plain PyTorch loop, the same with
                   DataParallel (loops.py), or workers and parameter servers
    parts          how many devices DataParallel uses
    warm_up_steps  the number of steps before the timed ones
    steps          the number of steps that are timed
    sampled_steps  the number of steps after them in which the process records what it does
    records_timed  the process records what it does in the timed steps
    """

    loop: Loop
    device: str
    warm_up_steps: int
    steps: int
    sampled_steps: int
    parts: int = 1
    records_timed: bool = False

    def save(self, folder: Path) -> None:
        _file(folder).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> "MeasurementRequest":
        return MeasurementRequest(**json.loads(_file(folder).read_text()))


@dataclass(frozen=True)
class ProcessAnswer:
    """What one process has measured: the seconds of a step, the loss of the last timed step, the bytes that it has sent
    in a step, its peak memory, the moments that it has recorded, and on a GPU the shares of its time. What it has not
    measured is None or empty."""

    step_s: float | None
    loss: float | None
    exchanged_bytes: float | None
    peak_memory_bytes: int
    samples: list[Sample]
    shares: dict[str, float] | None = None

    def save(self, folder: Path, rank: int) -> None:
        _answer_file(folder, rank).write_text(json.dumps(asdict(self)))


def load_answers(folder: Path, count: int) -> list[ProcessAnswer]:
    """Returns the answers of the processes that have answered, in the order of their ranks."""
    files = [_answer_file(folder, rank) for rank in range(count)]
    stored: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files if file.exists()]
    return [ProcessAnswer(**answer) for answer in stored]


def job_file(folder: Path) -> Path:
    return folder / "job.yaml"


def plan_file(folder: Path) -> Path:
    return folder / "plan.yaml"


def _file(folder: Path) -> Path:
    return folder / "request.json"


def _answer_file(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"
