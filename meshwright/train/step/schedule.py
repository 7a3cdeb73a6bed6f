"""Learning-rate schedules: when they are stepped, and with which metric."""

import inspect
from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.messages.exchange import broadcast_value
from meshwright.train.metrics import evaluated_value
from meshwright.train.step_runner import StepRunner
from meshwright.user.call import build
from meshwright.user.job_sections import LearningRateSchedule

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def build_schedule(job: Job, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Returns the schedule of a job that has one. Raises an `InputError` if the run could not step it."""
    assert job.schedule is not None
    schedule: LRScheduler = build(job.schedule, optimizer, role="schedule")
    _check_step(schedule, job.schedule, has_evaluations=job.data.eval is not None)
    return schedule


def _check_step(schedule: LRScheduler, spec: LearningRateSchedule, has_evaluations: bool) -> None:
    path = spec.call
    if not needs_metric(schedule):
        if spec.metric is not None:
            raise InputError(
                f"schedule.metric is '{spec.metric}', but {path}.step() needs no metric: leave schedule.metric out"
            )
        return
    try:
        inspect.signature(schedule.step).bind(0.0)
    except TypeError as error:
        raise InputError(f"schedule: {path}.step() needs more than one metric ({error}): use another one") from None
    if spec.per is not None:
        raise InputError(
            f"schedule.per is {spec.per}, but {path} needs a metric and is stepped after each evaluation: leave"
            " schedule.per out, and set log.eval_every_steps"
        )
    if not has_evaluations:
        raise InputError(
            f"schedule: {path} is stepped with a metric of each evaluation, but data.eval is missing: name the data set"
            " to measure it on"
        )


def needs_metric(schedule: LRScheduler) -> bool:
    """Whether the schedule's `step` must be called with a metric, as that of `ReduceLROnPlateau`."""
    parameters = inspect.signature(schedule.step).parameters.values()
    return any(parameter.default is parameter.empty and parameter.kind in _POSITIONAL for parameter in parameters)


def step_schedule(schedule: LRScheduler, metric: float | None) -> None:
    """Steps the schedule, with the metric of rank 0 if it needs one. All ranks call this together."""
    if not needs_metric(schedule):
        schedule.step()
        return
    if metric is None:
        raise InputError(
            f"the schedule {type(schedule).__name__} needs a metric: call session.step_schedule(metric), for example"
            " with a value that session.evaluate returned"
        )
    schedule.step(broadcast_value(float(metric)))


def step_after_evaluation(session: StepRunner, metric: str | None, values: Mapping[str, float]) -> None:
    """Steps the session's schedule if it needs a metric, with the value of this metric; None means `loss`. All ranks
    call this together."""
    if session.schedule is not None and needs_metric(session.schedule):
        session.step_schedule(evaluated_value(values, metric or "loss", "schedule.metric"))
