"""Times steps of a session on this rank alone.

With several ranks, each times what it computes by itself (`plan_of_rank`): one rank with its share of the batch, and
without exchanges. A rank whose step fails would otherwise leave the others in a collective, and a process group that
was interrupted there cannot be used again. Exchanges are the same in all variants, so leaving them out does not change
which variant is the fastest, except for how much of them is hidden behind computing. Plans that divide the model have
no such step, and are not timed; nor are sharded ones, which are for models that one rank cannot hold.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch

from meshwright.errors import InputError
from meshwright.model_io.batch import count_listed_samples, take_listed
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Memory, NumericsGroup
from meshwright.train.session import Session
from meshwright.train.step.batch import map_tensors, samples_in
from meshwright.train.step.cuda_graphs import StepGraphs
from meshwright.train.torch_private import compiles_with_cuda_graphs
from meshwright.train.tuning.variants import Timing

_CHECKED_LOSSES = 3
_WARM_UP_STEPS, _LONG_WARM_UP_STEPS = _CHECKED_LOSSES, 5  # compiled code captures graphs of its own in its first steps
# Rounds of steps: each of up to so many steps in so many seconds, and more than the least number only within `_MOST_S`.
_LEAST_ROUNDS, _MOST_ROUNDS, _MOST_STEPS, _ROUND_S, _MOST_S = 3, 5, 10, 0.2, 2.0
_SPREAD_STEPS = 3


def plan_of_rank(plan: Plan) -> Plan | None:
    """Returns the plan of what one rank computes, without exchanges; None if the ranks divide more than the batch."""
    if plan.processes == 1:
        return plan
    axes = plan.axes
    divides_model = plan.world_size > axes.replicate or axes.expert > 1 or bool(plan.modules.splits)
    if divides_model or plan.gradients.servers or plan.memory.offload != "none":
        return None
    return Plan(
        memory=Memory(recompute=plan.memory.recompute, accumulation=plan.memory.accumulation),
        numerics=NumericsGroup(precision=plan.numerics.precision),
        compute=plan.compute.model_copy(update={"cuda_graphs": False}),
    )


def compiling_as_in(plan: Plan) -> Any:
    """Returns the context in which the steps of `plan_of_rank` are compiled as the steps of this plan are: with several
    ranks, compiled code captures CUDA graphs of its own."""
    return compiles_with_cuda_graphs() if plan.compute.cuda_graphs and plan.processes > 1 else nullcontext()


def batch_of_size(batch: Any, samples: int) -> Any:
    """Returns a batch of so many of the batch's samples, from the first one on; they are repeated if there are too
    few."""
    size = samples_in(batch)
    if size == samples:
        return batch
    numbers = [number % size for number in range(samples)]
    if count_listed_samples(batch) is not None:
        return take_listed(batch, numbers)
    indices = torch.tensor(numbers)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[indices.to(tensor.device)] if tensor.dim() > 0 and len(tensor) == size else tensor

    return map_tensors(take, batch)


def time_steps(session: Session, batches: Sequence[Any], finds_spread: bool, timing: Timing) -> None:
    """Trains the session on the batches in turn, and writes into `timing` what they show. With CUDA graphs of the whole
    step, steps are timed before they are captured, and again afterwards, so that one compilation serves both. Raises an
    `InputError` if nothing is compiled although the plan says so."""
    compute, losses, graphs = session.plan.compute, list[float](), session.graphs
    is_eager = compute.compile == "none" and (graphs is not None or not compute.cuda_graphs)
    with graphs.paused() if graphs is not None else nullcontext():
        # The backward pass runs on this thread, so that it can be interrupted while it compiles.
        with torch.autograd.set_multithreading_enabled(False):
            for number in range(_WARM_UP_STEPS if is_eager else _LONG_WARM_UP_STEPS):
                losses.append(float(session.step(batches[number % len(batches)])))
        if compute.compile != "none" and not session.parallel.compilation.is_on:
            raise InputError("the compiler refuses all of it")
        timing.losses = tuple(losses[:_CHECKED_LOSSES])
        step_s = _median_step_s(session, batches)
        timing.spread = _spread(session, batches[0]) if finds_spread else 0.0
    if graphs is None:
        timing.step_s = step_s
        return
    timing.uncaptured_s = step_s
    for batch in batches:
        session.step(batch)
    if graphs.failure is not None:
        timing.failure = graphs.failure
        return
    step_s = _median_step_s(session, batches)
    timing.replayed = _replayed(session, graphs, batches[0])
    timing.step_s = step_s


def _median_step_s(session: Session, batches: Sequence[Any]) -> float:
    steps = max(1, min(_MOST_STEPS, int(_ROUND_S / _run(session, batches, 1))))
    rounds: list[float] = []
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and sum(rounds) < _MOST_S):
        rounds.append(_run(session, batches, steps))
    return median(rounds) / steps


def _run(session: Session, batches: Sequence[Any], steps: int) -> float:
    """Returns the seconds of so many steps in a row. A loss that is read waits for the device: not after each step,
    because training does not do so either. On a GPU a step before them keeps the device busy, so that they do not begin
    with its waiting for the host."""
    if session.world.device.type != "cuda":
        begin = perf_counter()
        for number in range(steps):
            loss = session.step(batches[number % len(batches)])
        float(loss)
        return perf_counter() - begin
    session.step(batches[-1])
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for number in range(steps):
        session.step(batches[number % len(batches)])
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _replayed(session: Session, graphs: StepGraphs, batch: Any) -> tuple[float, float]:
    """Returns the loss of a replayed step, and that of the same step without the graph. Both have the same weights and
    the same random numbers."""
    number = session.steps
    _stop_learning(session)
    replayed = float(session.step(batch))
    session.steps = number
    _stop_learning(session)
    with graphs.paused():
        return replayed, float(session.step(batch))


def _spread(session: Session, batch: Any) -> float:
    losses = []
    for _ in range(_SPREAD_STEPS):
        _stop_learning(session)
        losses.append(float(session.step(batch)))
    return max(losses) - min(losses)


def _stop_learning(session: Session) -> None:
    """Makes the next update of the weights change nothing. A schedule sets the rate again after each step."""
    for group in session.optimizer.param_groups:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate := group.get("lr"), torch.Tensor) else 0.0
