"""Builds the session of a job under a plan. It is separate from build.py because importing `Session` takes a second,
which checking a job does not need."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.call import bind, build
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.launch.world import World
from meshwright.parallel.apply import FillWeights
from meshwright.parallel.check import needs_structure
from meshwright.parallel.weights.deferred import build_on_meta, find_unreproducible, materialize
from meshwright.plan import Plan
from meshwright.train.build import (
    build_data,
    build_initialized_model,
    construct_model,
    freeze,
    frozen_modules,
    sample_batch,
    schedule_unit,
)
from meshwright.train.session import Report, Session
from meshwright.train.step.optimizer import optimizer_for_parameters, optimizer_groups

# If the model's weights are larger than this, a rank that needs only a part of them does not allocate all of them.
LARGE_BYTES = 2**30


def build_session(job: Job, plan: Plan, world: World, report: Report) -> Session:
    """Builds the session in which this rank trains the job. `report` is called with the rank's current activity, such
    as `forward`, which is written to its heartbeat."""
    model, fill = _build_model(job, plan, world.device)
    groups = optimizer_groups(job.optimizer, model)
    make_schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    if job.schedule:
        spec = job.schedule

        def make_schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
            return build(spec, optimizer, role="schedule")

    return Session(
        model,
        lambda parameters: optimizer_for_parameters(job.optimizer, groups, parameters),
        loss=bind(job.loss, "loss") if job.loss else None,
        plan=plan,
        world=world,
        make_schedule=make_schedule,
        schedule_per=schedule_unit(job),
        clip_norm=job.train.clip_norm,
        on_nonfinite="ignore" if job.train.on_nonfinite == "stop" else "skip",
        seed=job.train.seed,
        target=job.data.target,
        frozen=frozen_modules(model) if job.train.freeze else (),
        report=report,
        sample=sample_batch(job, build_data(job)[0]) if needs_structure(plan) else None,
        fill=fill,
    )


def _build_model(job: Job, plan: Plan, device: torch.device) -> tuple[nn.Module, FillWeights | None]:
    """Returns the initialized model and None. For a model above `LARGE_BYTES` that the plan divides among ranks, it
    returns the model on the meta device, and a function that creates this rank's weights after the plan was applied."""
    is_divided = plan.world_size > plan.axes.replicate and plan.stages_per_rank == 1
    if not is_divided or plan.compute.layout != "contiguous" or job.train.weights:
        return build_initialized_model(job), None
    seed = job.train.seed
    try:
        model, recording = build_on_meta(lambda: construct_model(job), seed)
    except InputError:  # the model's constructor reads values of tensors
        return build_initialized_model(job), None
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size <= LARGE_BYTES or find_unreproducible(model, recording):
        return build_initialized_model(job), None
    freeze(model, job.train.freeze)
    return model, lambda module, layouts: materialize(module, recording, layouts, seed, device)
