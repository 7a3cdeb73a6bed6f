"""Builds the session of a job under a plan. It is separate from build.py because importing `Session` takes a second,
which checking a job does not need."""

from functools import partial

import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.parallel.apply import FillWeights
from meshwright.parallel.check import needs_structure
from meshwright.parallel.weights.deferred import build_on_meta, find_unreproducible, materialize
from meshwright.parallel.weights.offload import CPU, offloads_parameters
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.build import (
    build_data,
    build_initialized_model,
    construct_model,
    freeze,
    frozen_modules,
    match_weights,
    sample_batch,
    schedule_unit,
)
from meshwright.train.loss.finder import needs_trial
from meshwright.train.loss.loss import LossFunction
from meshwright.train.loss.spikes import SpikeDetector
from meshwright.train.session import Report, Session
from meshwright.train.step.optimizer import optimizer_for_parameters, optimizer_groups
from meshwright.train.step.schedule import build_schedule
from meshwright.user.call import bind

# If the model's weights are larger than this, a rank that needs only a part of them does not allocate all of them.
LARGE_BYTES = 2**30


def build_session(job: Job, plan: Plan, world: World, report: Report) -> Session:
    """Builds the session in which this rank trains the job. `report` is called with the rank's current activity, such
    as `forward`, which is written to its heartbeat."""
    model, fill = _build_model(job, plan, world.device)
    loss = bind(job.loss, "loss") if job.loss else None
    groups = optimizer_groups(job.optimizer, model)
    return Session(
        model,
        lambda parameters: optimizer_for_parameters(job.optimizer, groups, parameters),
        loss=loss,
        plan=plan,
        world=world,
        make_schedule=partial(build_schedule, job) if job.schedule else None,
        schedule_per=schedule_unit(job),
        clip_norm=job.train.clip_norm,
        loss_scale=job.train.loss_scale,
        on_nonfinite="ignore" if job.train.on_nonfinite == "stop" else "skip",
        spikes=None if job.train.on_spike == "ignore" else SpikeDetector(job.train.spike),
        seed=job.train.seed,
        target=job.data.target,
        frozen=frozen_modules(model) if job.train.freeze else (),
        report=report,
        sample=sample_batch(job, build_data(job)[0]) if _needs_sample(plan, loss) else None,
        fill=fill,
    )


def _needs_sample(plan: Plan, loss: LossFunction | None) -> bool:
    return needs_structure(plan) or plan.compute.loss_chunks > 1 or plan.axes.shard > 1 or needs_trial(loss)


def _build_model(job: Job, plan: Plan, device: torch.device) -> tuple[nn.Module, FillWeights | None]:
    """Returns the initialized model and None. For a model above `LARGE_BYTES` that the plan divides among ranks, it
    returns the model on the meta device, and a function that creates this rank's weights, or reads them from
    `train.weights`, after the plan was applied."""
    is_divided = plan.world_size > plan.axes.replicate and plan.stages_per_rank == 1
    if not is_divided or plan.compute.layout != "contiguous":
        return build_initialized_model(job), None
    seed = job.train.seed
    try:
        model, recording = build_on_meta(lambda: construct_model(job), seed)
    except InputError:  # the model's constructor reads values of tensors
        return build_initialized_model(job), None
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size <= LARGE_BYTES:
        return build_initialized_model(job), None
    pretrained = match_weights(model, job.train.weights) if job.train.weights else {}
    if find_unreproducible(model, recording, pretrained):
        return build_initialized_model(job), None
    freeze(model, job.train.freeze)
    read = {name: tensor.read_region for name, tensor in pretrained.items()}
    shards = CPU if offloads_parameters(plan, device.type) else device
    return model, lambda module, layouts: materialize(module, recording, layouts, seed, device, read, shards)
