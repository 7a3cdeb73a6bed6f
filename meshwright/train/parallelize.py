"""`parallelize`: returns a session for a user's own training loop, in ranks that torchrun, mpirun, srun or another
launcher has started, or in a single process."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.collectives.torch_private import group_timeout_s
from meshwright.errors import InputError
from meshwright.job import load_plan
from meshwright.numbers.limits import is_number
from meshwright.parallel.exchange_names import ModelExchanges
from meshwright.plan import Plan
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.world import World, join
from meshwright.profile.optimizer import check_is_optimizer
from meshwright.train.job_agreement import agree_on_plan
from meshwright.train.loss.loss import LossFunction
from meshwright.train.output.peak_memory import memory_by_kind
from meshwright.train.session import Session
from meshwright.train.step.explained_errors import Explainer
from meshwright.train.step.optimizer import rebuild_optimizer


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: LossFunction | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    on_nonfinite: Literal["ignore", "skip"] = "ignore",
    seed: int = 0,
    target: str | None = None,
    device: str | None = None,
    timeout_s: float = 600,
    sample_batch: Any = None,
    check_plan: Callable[[Plan, World], None] | None = None,
) -> Session:
    """Returns a session as `mw.parallelize` does, which explains the other arguments. `check_plan` is called on every
    rank before the plan changes the model, and raises an error to refuse it."""
    _check_arguments(model, optimizer, loss, clip_norm, on_nonfinite, seed, device, timeout_s)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    world = join(kind, timeout_s)
    if plan is not None and not isinstance(plan, Plan):
        plan = load_plan(plan, "parallelize")
    plan = plan or Plan.model_validate({"axes": {"replicate": world.size}})
    agree_on_plan(plan, world, timeout_s)
    if check_plan is not None:
        check_plan(plan, world)
    heartbeat = Heartbeat.in_memory(world.attempt)
    explainer = Explainer(world, heartbeat, _group_timeout_s(world, timeout_s))
    this: ref[Session] | None = None  # weak, because the session holds `report`

    def report(activity: str) -> None:
        session = this() if this is not None else None
        heartbeat.update(session.steps if session else 0, activity)

    def memory() -> dict[str, int]:
        session = this() if this is not None else None
        return memory_by_kind(session.module, session.optimizer, world.device) if session else {}

    # Parameters are matched by name, because a plan may replace the parameter objects that the template refers to.
    names = {id(p): name for name, p in model.named_parameters()}
    session = Session(
        model,
        lambda parameters: rebuild_optimizer(optimizer, names, parameters) if optimizer else _without_parameters(),
        loss=loss,
        plan=plan,
        world=world,
        make_schedule=schedule,
        clip_norm=clip_norm,
        on_nonfinite=on_nonfinite,
        seed=seed,
        target=target,
        sample=sample_batch,
        report=report,
    )
    this = ref(session)
    session.explainer = explainer
    heartbeat.exchanges = ModelExchanges(session.parallel)
    heartbeat.memory = memory
    if optimizer is not None:
        _mark_used(optimizer)
    session.checks_first_batch = True
    session.compare_weight_copies()
    return session


def _group_timeout_s(world: World, timeout_s: float) -> float:
    """A process group that the script has made keeps its own timeout."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return timeout_s if group is None or world.store is not None else group_timeout_s(group)


def _check_arguments(
    model: Any,
    optimizer: Any,
    loss: Any,
    clip_norm: Any,
    on_nonfinite: Any,
    seed: Any,
    device: Any,
    timeout_s: Any,
) -> None:
    """Raises an `InputError` if an argument of `parallelize` cannot be used. Otherwise some of them would fail much
    later, or train in the wrong direction."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not an nn.Module")
    if optimizer is not None:
        check_is_optimizer(optimizer)
    if loss is not None and not callable(loss):
        raise InputError(f"loss is {loss!r}: give a function of the model's output and the target")
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise InputError(f"clip_norm is {clip_norm!r}: give a number above 0, or None")
    if on_nonfinite not in ("ignore", "skip"):
        raise InputError(f"on_nonfinite is {on_nonfinite!r}: give 'ignore' or 'skip'")
    if not isinstance(seed, Integral):
        raise InputError(f"seed is {seed!r}: give a whole number")
    if device not in (None, "cuda", "cpu"):
        raise InputError(f"device is {device!r}: give 'cuda', 'cpu' or None")
    if not (is_number(timeout_s) and 0 < timeout_s < math.inf):
        raise InputError(f"timeout_s is {timeout_s!r}: give a number of seconds above 0")


def _without_parameters() -> torch.optim.Optimizer:
    """Returns an optimizer that updates nothing, for a model that is not trained."""
    return torch.optim.SGD([{"params": []}], lr=0.0)


def _mark_used(optimizer: torch.optim.Optimizer) -> None:
    """Makes `optimizer.step` raise an error, because stepping the template would not train the parallel model."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "this optimizer was a template for parallelize(): call session.step(batch) instead, or"
            " session.optimizer.step() in a loop with its own backward"
        )

    optimizer.step = refuse  # type: ignore[method-assign]
