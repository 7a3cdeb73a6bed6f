"""The steps that are measured: those of a session under a plan, and those of a plain PyTorch loop without Meshwright,
in one process, on one device or on several with DataParallel. All of them start with the same weights and get the same
batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshwright.bench.threads import data_parallel
from meshwright.data.batch import SampleShare
from meshwright.data.loading import train_batches
from meshwright.job import Job
from meshwright.model_io.batch import split_batch, target_key
from meshwright.parallel.precision import forward_precision, fp32_product_precision, register_casts
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.build import build_data, build_initialized_model, build_loading
from meshwright.train.job_session import build_session
from meshwright.train.loss.loss import loss_from_model
from meshwright.train.step.optimizer import build_optimizer
from meshwright.user.call import bind

Step = Callable[[], Tensor]  # makes a step, and returns its loss


def session_steps(job: Job, plan: Plan, world: World, count: int) -> Step:
    """Returns the step of a session. The batches of `count` steps are loaded before."""
    session = build_session(job, plan, world, lambda activity: None)
    loading = replace(build_loading(job, world.device), workers=0)
    batches = session.batches(build_data(job)[0], None, job.train.global_batch, loading, job.data.drop_last)
    loaded = iter(list(islice(batches, count)))
    return lambda: session.step(next(loaded))


def plain_steps(job: Job, plan: Plan, device: torch.device, parts: int, count: int) -> Step:
    """Returns the step of a plain loop in the plan's precision. With several `parts`, DataParallel runs the model."""
    loss_function = bind(job.loss, "loss") if job.loss else loss_from_model().function
    model = build_initialized_model(job).to(device)
    register_casts(plan, model)
    optimizer = build_optimizer(job.optimizer, model)
    runner = data_parallel(model, parts, device.type) if parts > 1 else model
    scaler = torch.amp.GradScaler(device.type, enabled=plan.numerics.precision == "fp16")
    batches = iter(list(islice(_batches(job, device), count)))
    key = target_key(job.data.target, job.loss is not None)

    def step() -> Tensor:
        example = split_batch(next(batches), key)
        with fp32_product_precision(plan, device.type):
            with forward_precision(plan, device.type):
                result: Any = loss_function(runner(*example.arguments, **example.keywords), example.target)
            # Some losses return a sum and a count.
            loss: Tensor = result[0] / result[1] if isinstance(result, tuple) else result
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if job.train.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_norm)
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


def _batches(job: Job, device: torch.device) -> Iterator[Any]:
    """Yields the global batches in the order in which the job is trained."""
    loading = replace(build_loading(job, device), workers=0)
    batches = train_batches(
        build_data(job)[0],
        seed=job.train.seed,
        global_batch=job.train.global_batch,
        share=SampleShare(),
        loading=loading,
        drop_last=job.data.drop_last,
    )
    for batch in batches:
        yield tree_map(
            lambda value: value.to(device) if isinstance(value, Tensor) else value, batch.microbatches[0].data
        )
