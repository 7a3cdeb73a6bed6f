"""A job under a plan as a session. Apart from the job's parts: whoever only checks a job does without the engine, which
takes a second to import."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.call import bind, build
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.launch.world import World
from meshwright.parallel.apply import Fill
from meshwright.parallel.check import needs_structure
from meshwright.parallel.weights.deferred import materialize, problems, recorded
from meshwright.plan import Plan
from meshwright.train.build import (
    build_data,
    build_model,
    freeze,
    frozen_modules,
    make_model,
    sample_batch,
    schedule_unit,
)
from meshwright.train.session import Report, Session
from meshwright.train.step.optimizer import optimizer_groups, optimizer_on

LARGE_BYTES = 2**30  # of weights, from which a rank does not build a model that it holds a part of


def build_session(job: Job, plan: Plan, world: World, report: Report) -> Session:
    model, fill = _start(job, plan, world.device)
    groups = optimizer_groups(job.optimizer, model)
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    if job.schedule:
        spec = job.schedule

        def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
            return build(spec, optimizer, role="schedule")

    return Session(
        model,
        lambda parameters: optimizer_on(job.optimizer, groups, parameters),
        loss=bind(job.loss, "loss") if job.loss else None,
        plan=plan,
        world=world,
        make_schedule=schedule,
        schedule_per=schedule_unit(job),
        clip_norm=job.train.clip_norm,
        seed=job.train.seed,
        target=job.data.target,
        frozen=frozen_modules(model) if job.train.freeze else (),
        report=report,
        sample=sample_batch(job, build_data(job)[0]) if needs_structure(plan) else None,
        fill=fill,
    )


def _start(job: Job, plan: Plan, device: torch.device) -> tuple[nn.Module, Fill | None]:
    """A large model that the plan divides is built without memory, and every rank fills only its part of it."""
    divided = plan.world_size > plan.axes.replicate and plan.stages_per_rank == 1
    if not divided or plan.compute.layout != "contiguous" or job.train.weights:
        return build_model(job), None
    seed = job.train.seed
    try:
        model, recording = recorded(lambda: make_model(job), seed)
    except InputError:  # its code wants real numbers
        return build_model(job), None
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size <= LARGE_BYTES or problems(model, recording):
        return build_model(job), None
    freeze(model, job.train.freeze)
    return model, lambda module, layouts: materialize(module, recording, layouts, seed, device)
