"""Whether a job can start at all, found out before any rank is started and anything is written."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.batch import split
from meshwright.call import bind, build, check_arguments, load
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.job import Job
from meshwright.parallel.check import check_cast, check_plan, check_runnable, check_sparse, needs_structure
from meshwright.parallel.tensor.dimension import check_dimension
from meshwright.plan import Plan
from meshwright.train.build import (
    build_data,
    build_loading,
    build_metrics,
    freeze,
    load_weights,
    make_model,
    sample_batch,
)
from meshwright.train.step.loss import check_joined, understand
from meshwright.train.step.optimizer import build_optimizer


def check(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raises the one line that the user needs to mend the job."""
    check_runnable(plan)
    check_servers(plan)
    check_devices(plan, cluster)
    check_batch(job, plan)
    model = _check_model(job)
    if model is not None:
        check_sparse(plan, model, job.train.clip_norm)
    build_metrics(job)
    build_loading(job, torch.device("cpu"))
    if job.loss:
        check_joined(understand(bind(job.loss, "loss")), plan)
    train, _ = build_data(job)
    if plan.numerics.cast == "weights":
        check_cast(plan, model or make_model(job))
    if job.data.partition == "dimension":
        check_dimension(plan, make_model(job), split(sample_batch(job, train), job.data.target))
    if needs_structure(plan):
        check_plan(plan, model or make_model(job), sample_batch(job, train), job.data.target)


def check_servers(plan: Plan) -> None:
    """What workers that only talk to servers cannot do together."""
    if not plan.gradients.servers:
        return
    if plan.numerics.batch_norm == "synchronized":
        raise InputError(
            "plan.numerics.batch_norm is synchronized, for which workers would have to wait for each other in every"
            f" layer, but gradients.servers is {plan.gradients.servers}: set one of them to local, or to 0"
        )
    if plan.compute.cuda_graphs and plan.compute.compile == "none":
        raise InputError(
            "plan.compute.cuda_graphs records whole steps, which servers take part in: leave it out, or set"
            " compute.compile to default"
        )
    if plan.modules.splits:
        raise InputError(
            f"plan.modules.splits.{next(iter(plan.modules.splits))} divides a layer among ranks, but servers hold the"
            " weights: leave out one of them"
        )


def check_devices(plan: Plan, cluster: Cluster) -> None:
    if plan.world_size > cluster.devices:
        axes = " × ".join(f"{name}({size})" for name, size in plan.axes.model_dump().items() if size > 1)
        kind = "GPUs" if cluster.kind == "cuda" else "CPU cores"
        shared = f", or --cluster {plan.world_size}xcpu to share the cores" if cluster.kind == "cpu" else ""
        raise InputError(
            f"{axes} = {plan.world_size} ranks, but the cluster '{cluster.name}' has {cluster.devices} devices"
            f" ({kind}): choose axes whose product is at most {cluster.devices}{shared}"
        )


def check_batch(job: Job, plan: Plan) -> None:
    if job.train.global_batch < plan.shares:
        raise InputError(
            f"train.global_batch is {job.train.global_batch}, smaller than {plan.data_ranks} ranks ×"
            f" {plan.microbatches} microbatches = {plan.shares}: raise it, or use fewer ranks"
        )


def _check_model(job: Job) -> nn.Module | None:
    """Builds the model without memory, to see that names in the job are names in the model. None where it cannot be
    built so."""
    target = load(job.model.call)
    check_arguments(target, (), job.model.arguments, f"model: {job.model.call}")
    load(job.optimizer.call)
    if job.schedule:
        load(job.schedule.call)
    try:
        with torch.device("meta"):
            model = make_model(job)
    except MeshwrightError:
        raise
    except Exception:  # some models cannot be built without memory: the ranks will build and check them
        return None
    if job.train.weights:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is copied into a model without memory
            load_weights(model, job.train.weights)
    freeze(model, job.train.freeze)
    optimizer = _said(lambda: build_optimizer(job.optimizer, model), "optimizer")
    if job.schedule:
        spec = job.schedule
        schedule = _said(lambda: build(spec, optimizer, role="schedule"), "schedule")
        check_arguments(schedule.step, (), {}, f"schedule: {spec.call} is stepped without a value, but its step()")
    return model


def _said(make: Callable[[], Any], role: str) -> Any:
    """A constructor's own complaint about its arguments (`Invalid learning rate: -1`) is the user's to read."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise InputError(f"{role}: {error}") from None
