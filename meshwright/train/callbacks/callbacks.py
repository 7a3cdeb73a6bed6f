"""`Callbacks`: calls the objects that a job names under `callbacks`. An object has any of these methods:

begin(run)                  before the first step of a run, and again when it is resumed
step(run, step, loss)       after each step; on a GPU, two steps later
evaluation(run, metrics)    after each evaluation
save(run, path)             after each checkpoint
end(run, result)            after the last step

They are called on rank 0 only, unless the object has `every_rank = True`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.messages.exchange import all_gather_values
from meshwright.train.callbacks.run import CallbackRun
from meshwright.train.step.divergence import LossReader
from meshwright.user.call import build
from meshwright.user.code import raise_user_code_error

EVENTS = ("begin", "step", "evaluation", "save", "end")


class Callback(NamedTuple):
    """An object of the user, and what error messages call it."""

    name: str
    object: Any

    def handles(self, event: str) -> bool:
        return callable(getattr(self.object, event, None))


def build_callbacks(job: Job) -> list[Callback]:
    """Returns the job's callbacks. Raises an `InputError` if one of them has none of the methods."""
    callbacks = []
    for index, call in enumerate(job.callbacks):
        role = f"callbacks[{index}]"
        callback = Callback(f"{role} ({call.call})", build(call, role=role))
        if not any(map(callback.handles, EVENTS)):
            raise InputError(
                f"{role}: {call.call} makes a {type(callback.object).__name__}, which has none of the methods"
                f" {', '.join(EVENTS)}: give it those that are to be called"
            )
        callbacks.append(callback)
    return callbacks


class Callbacks:
    """The callbacks of one rank. All ranks call its methods together. `report` is called with what this rank is doing,
    for its heartbeat. `stopped` says why a callback ended the run; None if none did."""

    def __init__(self, callbacks: list[Callback], run: CallbackRun, report: Callable[[str], None]) -> None:
        self._callbacks = callbacks
        self._run = run
        self._report = report
        self._losses = LossReader()
        self._may_have_stopped = False  # whether a callback of any rank was called since the ranks last agreed
        self.stopped: str | None = None

    def handle(self, event: str) -> bool:
        """Whether any callback has a method for this event."""
        return any(callback.handles(event) for callback in self._callbacks)

    def begin(self) -> None:
        self._call("begin")

    def step(self, step: int, loss: Tensor) -> None:
        """Takes the loss of a step, and calls the callbacks for all steps whose losses are known now. On a GPU, the
        loss is read later, so that the host does not wait for it."""
        if self.handle("step"):
            for read_step, value in self._losses.read(step, loss):
                self._call("step", read_step, value)

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        self._finish_steps()
        self._call("evaluation", dict(metrics))

    def save(self, path: Path) -> None:
        self._finish_steps()
        self._call("save", path)

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Calls `end` with the content of result.json, or with None if a signal stopped the run before its end."""
        self._finish_steps()
        self._call("end", None if result is None else dict(result))

    def agree_to_stop(self) -> bool:
        """Returns whether a callback of any rank has asked to end the run, the same on all ranks."""
        if self._may_have_stopped:
            self._may_have_stopped = False
            reasons = all_gather_values(self._run.requested_stop)
            self.stopped = next((reason for reason in reasons if reason is not None), None)
        return self.stopped is not None

    def _finish_steps(self) -> None:
        """Calls `step` for the steps whose losses were not read yet, so that later events come after them."""
        for step, loss in self._losses.read_remaining():
            self._call("step", step, loss)

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            if not callback.handles(event):
                continue
            self._may_have_stopped = True
            if self._run.rank != 0 and not getattr(callback.object, "every_rank", False):
                continue
            self._report("callback")
            try:
                getattr(callback.object, event)(self._run, *arguments)
            except BaseException as error:
                raise_user_code_error(error, f"{callback.name}.{event}")
