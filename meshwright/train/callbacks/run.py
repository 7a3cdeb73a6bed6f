"""`CallbackRun`: what a callback of a job knows about its run, and what it can ask of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.processes.world import World
from meshwright.train.output.folder import RunFolder
from meshwright.train.step_runner import StepRunner


class CallbackRun:
    """The first argument of every method of a callback.

    `folder` is the run folder, `job` the job as plain data, `plan` a summary of the plan such as `replicate 2 · fp32`,
    `rank` the number of this rank and `ranks` how many there are.
    """

    def __init__(self, job: Job, session: StepRunner, world: World, folder: RunFolder) -> None:
        self.folder = folder.path
        self.job: dict[str, Any] = job.model_dump(mode="json")
        self.plan = session.plan.summary()
        self.rank = world.rank
        self.ranks = world.size
        self.requested_stop: str | None = None  # why a callback of this rank wants the run to end; None if none does
        self._session = session
        self._metrics = folder.metrics

    @property
    def steps(self) -> int:
        """The number of steps that the run has made."""
        return self._session.steps

    def stop(self, reason: str) -> None:
        """Ends the run after the current step, on all ranks: it evaluates, saves, and is finished. `reason` is printed
        and becomes the entry `stopped` of the result."""
        self.requested_stop = self.requested_stop or " ".join(str(reason).split())

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the evaluations of the run so far, also those before it was resumed, from the oldest to the newest:
        dicts with `step`, `epoch`, `loss` and the metrics. A value that was NaN or infinite is None."""
        try:
            lines = self._metrics.read_text().splitlines()
        except FileNotFoundError:
            return []
        entries = (json.loads(line) for line in lines)
        return [entry for entry in entries if entry["kind"] == "eval"]

    @property
    def model(self) -> nn.Module:
        """The user's model with the current weights. Under shards and tensor splits, its forward passes communicate,
        so all ranks have to make the same ones. Raises an `InputError` if no rank has the whole model."""
        module, plan = self._session.module, self._session.plan
        if module is None:
            raise InputError(
                f"run.model: callbacks run on the parameter servers, and only workers have the model ({self.plan}): use"
                " the checkpoint that `save` gets, or set gradients.servers to 0"
            )
        if plan.axes.pipeline > 1:
            raise InputError(
                f"run.model: each rank has only some layers of the model ({self.plan}): use the checkpoint that `save`"
                " gets, or set axes.pipeline to 1"
            )
        return module

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Within this context, which yields `model`, the model is in evaluation mode and no gradients are computed."""
        model = self.model
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                yield model
        finally:
            for module, is_training in modes:
                module.training = is_training
