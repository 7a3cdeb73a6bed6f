"""`DivergenceMonitor`: ends a run whose loss or gradients stay NaN or infinite, or whose loss stays far above that of
earlier steps. The job's `train.on_nonfinite` and `train.on_spike` say when."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from meshwright.errors import TrainingDiverged

MOST_NONFINITE_LOSSES = 3  # steps in a row, with `stop`
MOST_SKIPPED_STEPS = 25  # steps in a row, with `skip`
MOST_REWINDS = 10  # without a new checkpoint between them, with `rewind`
_DELAY_STEPS = 2


class LossReader:
    """Reads the losses of steps without making the host wait for the newest step on a GPU: there, the loss of a step is
    read when the step after the next one has been started. On the CPU, it is read at once. All ranks read the same
    losses after the same steps."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def read(self, step: int, loss: Tensor) -> list[tuple[int, float]]:
        """Takes the loss of a step. Returns the steps whose losses are known now, with these losses."""
        if loss.device.type != "cuda":
            return [(step, float(loss))]
        on_host = torch.empty_like(loss, device="cpu", pin_memory=True)
        on_host.copy_(loss.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((step, on_host, event))
        return self._read_until(_DELAY_STEPS)

    def read_remaining(self) -> list[tuple[int, float]]:
        """Returns the steps whose losses were not returned yet, with these losses."""
        return self._read_until(0)

    def _read_until(self, pending: int) -> list[tuple[int, float]]:
        losses = []
        while len(self._pending) > pending:
            step, on_host, event = self._pending.popleft()
            event.synchronize()
            losses.append((step, float(on_host)))
        return losses


class DivergenceMonitor:
    """Raises `TrainingDiverged` when training goes on without effect: when the loss is not finite for a few steps in a
    row (`stop`), when too many updates in a row are left out (`skip`), or when the run goes back to the same checkpoint
    too often (`rewind`). All ranks raise it after the same step."""

    def __init__(
        self,
        on_nonfinite: Literal["skip", "rewind", "stop"],
        on_spike: Literal["ignore", "skip", "rewind", "stop"] = "ignore",
    ) -> None:
        self._stops = on_nonfinite == "stop"
        self._on_nonfinite = on_nonfinite
        self._on_spike = on_spike
        self._spikes_in_a_row = 0
        self._losses = LossReader()
        self._first_step = 0  # of the steps in a row that were not finite
        self._in_a_row = 0
        self._problem = ""  # what was not finite in the last of them
        self._warned = False
        self._rewinds = 0

    def after_step(self, step: int, loss: Tensor, problem: str | None, skipped_steps: int) -> str | None:
        """Notes a step. `problem` is what the session found not to be finite in it, and `skipped_steps` the number of
        updates that were left out so far; with `stop`, the session leaves none out, and only the loss counts. Returns
        a line to tell the user, or None."""
        if not self._stops:
            self._note(step, problem)
            return f"step {step}: {problem}: its update is left out ({skipped_steps} so far)" if problem else None
        for read_step, value in self._losses.read(step, loss):
            self._note(read_step, _describe(value))
        if not self._in_a_row or self._warned:
            return None
        self._warned = True
        return (
            f"step {self._first_step}: {self._problem}: the run ends after {MOST_NONFINITE_LOSSES} such steps in a row"
        )

    def after_spike(self, step: int, spike: str | None, skipped_steps: int) -> str | None:
        """Notes why the loss of a step was a spike; None if it was none. Returns a line to tell the user, or None."""
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if spike else 0
        if spike is None:
            return None
        actions = "look at the data of this step, lower the learning rate, or set train.clip_norm"
        if self._on_spike == "stop":
            raise TrainingDiverged(f"step {step}: {spike}: {actions}; train.on_spike is stop")
        if self._spikes_in_a_row == MOST_SKIPPED_STEPS:
            raise TrainingDiverged(
                f"step {step}: {spike}, as in each of the last {MOST_SKIPPED_STEPS} steps: {actions}; or raise"
                " train.spike.deviations"
            )
        return f"step {step}: {spike}: its update is left out ({skipped_steps} so far)"

    def at_end(self, steps: int, skipped_steps: int) -> None:
        """Raises `TrainingDiverged` if the run, which has made all its steps, did not end well: the last loss is not
        finite (`stop`), or every update was left out."""
        for step, value in self._losses.read_remaining():
            self._note(step, _describe(value))
        if self._stops and self._in_a_row:
            raise TrainingDiverged(
                f"{self._problem} since step {self._first_step}, up to the last step: {self._advice}"
            )
        if steps and skipped_steps >= steps:
            raise TrainingDiverged(f"the updates of all {steps} steps were left out: {self._advice}")

    @staticmethod
    def check_last_evaluation(evaluation: tuple[int, Mapping[str, float]] | None) -> None:
        """Raises `TrainingDiverged` if the loss of the run's last evaluation is not finite. The weights are saved."""
        step, values = evaluation or (0, {})
        if problem := _describe(values.get("loss", 0.0)):
            raise TrainingDiverged(f"evaluation after step {step}: {problem}: look at the samples of data.eval")

    @property
    def may_rewind(self) -> bool:
        """Whether the run goes back to a checkpoint after some steps."""
        return "rewind" in (self._on_nonfinite, self._on_spike)

    def reason_to_rewind(self, nonfinite: str | None, spike: str | None) -> str | None:
        """Returns why the run has to go back after a step; None if it does not. The session has the arguments."""
        reasons = ((self._on_nonfinite, nonfinite), (self._on_spike, spike))
        return next((problem for action, problem in reasons if action == "rewind" and problem), None)

    def note_rewind(self, step: int, problem: str) -> None:
        """Notes that the run goes back to its newest checkpoint because of `problem` in this step."""
        self._rewinds += 1
        if self._rewinds > MOST_REWINDS:
            raise TrainingDiverged(
                f"step {step}: {problem}, and the run went back to its newest checkpoint {MOST_REWINDS} times without"
                f" reaching the next one: {self._advice}"
            )

    def note_checkpoint(self) -> None:
        """Notes that a checkpoint was saved."""
        self._rewinds = 0

    def _note(self, step: int, problem: str | None) -> None:
        self._first_step = step if self._in_a_row == 0 else self._first_step
        self._in_a_row = self._in_a_row + 1 if problem else 0
        self._problem = problem or self._problem
        if self._in_a_row == (MOST_NONFINITE_LOSSES if self._stops else MOST_SKIPPED_STEPS):
            raise TrainingDiverged(
                f"{self._problem} since step {self._first_step}, for {self._in_a_row} steps in a row: {self._advice}"
            )

    @property
    def _advice(self) -> str:
        actions = ["look at the data of these steps", "lower the learning rate", "set train.clip_norm"]
        if self._stops:
            actions.append("set train.on_nonfinite to skip or rewind")
        return f"{', '.join(actions[:-1])}, or {actions[-1]}"


def _describe(loss: float) -> str | None:
    return None if math.isfinite(loss) else f"the loss is {loss}"
