"""A callback that writes down what it is called with, for tests that run the job in this process or in ranks."""

from pathlib import Path
from typing import Any

import torch

from meshwright.train.callbacks.run import CallbackRun


class Recorder:
    """Appends one line to the file `calls-RANK` of the run folder for each call. Ends the run after step `stop_at`, and
    fails at step `fail_at`."""

    def __init__(self, every_rank: bool = False, stop_at: int | None = None, fail_at: int | None = None) -> None:
        self.every_rank = every_rank
        self.stop_at = stop_at
        self.fail_at = fail_at

    def write(self, run: CallbackRun, line: str) -> None:
        with (run.folder / f"calls-{run.rank}").open("a") as file:
            file.write(f"{line}\n")

    def begin(self, run: CallbackRun) -> None:
        self.write(run, f"begin {run.job['name']} {run.plan} {run.ranks} {run.steps}")

    def step(self, run: CallbackRun, step: int, loss: float) -> None:
        assert type(loss) is float
        self.write(run, f"step {step}")
        if step == self.fail_at:
            raise ValueError("no more disk quota")
        if step == self.stop_at:
            run.stop("enough\nsteps")

    def evaluation(self, run: CallbackRun, metrics: dict[str, float]) -> None:
        self.write(run, f"evaluation {run.steps} {' '.join(sorted(metrics))}")

    def save(self, run: CallbackRun, path: Path) -> None:
        assert path.is_dir()
        self.write(run, f"save {path.name}")

    def end(self, run: CallbackRun, result: dict[str, Any] | None) -> None:
        self.write(run, f"end {result and result['steps']}")


class Outputs:
    """Calls the model after each evaluation, on all ranks, and writes the sum of its outputs down."""

    every_rank = True

    def evaluation(self, run: CallbackRun, metrics: dict[str, float]) -> None:
        with run.evaluating() as model:
            assert not model.training
            output = model(torch.ones(3, 20))
            assert not output.requires_grad
        assert model.training
        with (run.folder / f"outputs-{run.rank}").open("a") as file:
            file.write(f"{float(output.double().sum())!r}\n")


class Nothing:
    """No callback, because it has none of the methods."""

    def evaluate(self) -> None:
        raise AssertionError("never called")
