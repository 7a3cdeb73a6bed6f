"""Checks whether a job can run, before any rank is started and any file is written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.files.trust import environment_key
from meshwright.job import Job
from meshwright.model_io.batch import split_batch, target_key
from meshwright.numbers.limits import MOST_RANKS_HERE, MOST_RANKS_PER_CORE
from meshwright.parallel.check import check_cast, check_sparse, checker_of_plans, needs_structure
from meshwright.parallel.tensor.dimension_partition import check_dimension_partition
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.train.build import (
    build_initialized_model,
    build_loading,
    build_metrics,
    construct_model,
    freeze,
    match_weights,
)
from meshwright.train.callbacks.callbacks import build_callbacks
from meshwright.train.job_parts import JobParts
from meshwright.train.loss.loss import check_sample_comparison, classify_loss
from meshwright.train.loss.output_form import FakeModel
from meshwright.train.loss.trial import find_loss, find_model_loss, is_from_torch
from meshwright.train.shares.check import check_global_batch, check_optimizer
from meshwright.train.step.optimizer import build_optimizer
from meshwright.train.step.sampling import check_sampling
from meshwright.train.step.schedule import build_schedule
from meshwright.user.call import bind, check_arguments, load

_LARGEST_TRIED = 5 * 10**7  # parameters: the loss inside a larger model is tried by the ranks


def check_job(job: Job, plan: Plan, cluster: Cluster, parts: JobParts | None = None) -> None:
    """Raises an `InputError` of one line if the job cannot run under the plan on the cluster. `parts` caches what
    has been built from the job."""
    parts = parts or JobParts(job)
    environment_key()  # raises an error if the key that signs the run cannot be read
    check_rules(plan, **facts_of(job), device=cluster.kind)
    check_devices(plan, cluster)
    check_global_batch(plan, job.train.global_batch, job.data.partition, job.data.parts)
    model = _check_model(job, plan, parts)
    if model is not None:
        check_sparse(plan, model, job.train.clip_norm)
    build_metrics(job)
    build_callbacks(job)
    loading = build_loading(job, torch.device("cpu"))
    train_set, _ = parts.data  # built to report missing files
    check_sampling(train_set, loading.sampling)
    check_loss(job, plan, parts)
    if plan.numerics.cast == "weights":
        check_cast(plan, parts.model)
    if job.data.partition == "dimension":
        check_dimension_partition(
            plan, construct_model(job), split_batch(parts.sample, target_key(job.data.target, job.loss is not None))
        )
    if needs_structure(plan) or plan.memory.recompute == "selective" or plan.compute.compile != "none":
        checker_of_plans(parts.structure)(plan)


def check_loss(job: Job, plan: Plan, parts: JobParts) -> None:
    """Raises an `InputError` if the loss compares the samples of a batch with each other and the plan divides the
    batch in a way that prevents it. The loss of a model that computes it itself is tried with real weights, if the
    model is small."""
    if plan.batch_parts == 1:
        return
    if job.loss:
        function = bind(job.loss, "loss")
        if is_from_torch(function):
            check_sample_comparison(classify_loss(function), plan)
        else:
            check_sample_comparison(find_loss(function, FakeModel(parts.model), parts.sample, job.data.target), plan)
    elif sum(p.numel() for p in parts.model.parameters()) <= _LARGEST_TRIED:
        check_sample_comparison(find_model_loss(build_initialized_model(job), parts.sample), plan)


def facts_of(job: Job) -> dict[str, Any]:
    """What rules about a plan have to know of its job."""
    return {"train": job.train, "checkpoint": job.checkpoint, "partition": job.data.partition}


def check_devices(plan: Plan, cluster: Cluster) -> None:
    if plan.world_size > cluster.device_count:
        axes = " × ".join(f"{name}({size})" for name, size in plan.axes.factors.items())
        kind = "GPUs" if cluster.kind == "cuda" else "CPU cores"
        share_cores = f", or use --cluster {plan.world_size}xcpu to let several ranks share a core"
        raise InputError(
            f"plan.axes: {axes} = {plan.world_size} ranks, but the cluster '{cluster.name}' has"
            f" {cluster.device_count} devices ({kind}): choose axes whose product is at most {cluster.device_count}"
            f"{share_cores if cluster.kind == 'cpu' else ''}"
        )


def check_rank_count(plan: Plan, cluster: Cluster) -> None:
    """Raises an `InputError` if the plan has more processes than a command starts on this machine."""
    most = min(MOST_RANKS_HERE, MOST_RANKS_PER_CORE * cluster.cores)
    if plan.processes > most:
        raise InputError(
            f"the plan ({plan.summary()}) has {plan.processes} processes, but this machine has {cluster.cores} cores"
            f" and starts at most {most}: use --cluster {most}xcpu or fewer, or a plan of fewer ranks"
        )


def _check_model(job: Job, plan: Plan, parts: JobParts) -> nn.Module | None:
    """Builds the model on the meta device and returns it. Raises an `InputError` if the job's `train.weights`,
    `train.freeze`, `optimizer` or `schedule` do not fit it or the plan. Returns None if the model cannot be built
    on the meta device; then the ranks check it."""
    target = load(job.model.call)
    check_arguments(target, (), job.model.arguments, f"model: {job.model.call}")
    load(job.optimizer.call)
    if job.schedule:
        load(job.schedule.call)
    model = parts.meta_model
    if model is None:
        return None
    if job.train.weights:
        match_weights(model, job.train.weights)
    freeze(model, job.train.freeze)
    optimizer = _explain_errors(lambda: build_optimizer(job.optimizer, model), "optimizer")
    check_optimizer(plan, optimizer)
    if job.schedule:
        _explain_errors(lambda: build_schedule(job, optimizer), "schedule")
    return model


def _explain_errors(make: Callable[[], Any], role: str) -> Any:
    """Calls a constructor, and turns its error about an argument (`Invalid learning rate: -1`) into an `InputError`."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise InputError(f"{role}: {error}") from None
