"""The training of a job, for its check, and the checks that commands make before a job is trained."""

from functools import partial

import torch
from torch import nn

from meshwright.auto.decide import plan_of_job
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError, UnequalPlan
from meshwright.job import Job
from meshwright.parallel.weights.deferred import build_on_meta, find_unreproducible, materialize
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.world import World
from meshwright.proof.before_training.before_training import check_here, check_in_world
from meshwright.proof.before_training.plan_kind import UnequalDivisions, needs_check, refuse_divided
from meshwright.proof.before_training.training import Training
from meshwright.train.build import build_initialized_model, construct_model, freeze
from meshwright.train.job_parts import JobParts
from meshwright.train.step.optimizer import build_optimizer
from meshwright.user.call import bind

SKIP = "--unproved"  # the option of commands that train without a check
_CPU = torch.device("cpu")


class CheckHere:
    """Checks the plans of a job before its ranks are started on this machine. `refused` raises an `InputError` for
    plans that divide the model as one does that was found unequal."""

    def __init__(self, parts: JobParts, cluster: Cluster) -> None:
        self._parts = parts
        self._cluster = cluster
        self.refused = UnequalDivisions()

    def __call__(self, plan: Plan) -> None:
        """Raises `UnequalPlan` if the plan does not train the same model as one device."""
        if not needs_check(plan) and plan.batch_parts == 1:
            return
        try:
            training = training_of_job(self._parts)
            check_here(training, plan, device=self._cluster.kind, skip=SKIP, suggest=self._fastest_undivided)
        except UnequalPlan as error:
            self.refused.add(plan, error)
            raise

    def _fastest_undivided(self) -> Plan:
        return plan_of_job(self._parts, self._cluster, "auto", refuse=refuse_divided).plan


class CheckInWorld:
    """Checks the plans of a job in ranks that run already, which all call it together. `refused` is that of
    `CheckHere`."""

    def __init__(self) -> None:
        self.refused = UnequalDivisions()

    def __call__(self, job: Job, plan: Plan, world: World) -> None:
        """Raises `UnequalPlan` on every rank if the plan does not train the same model as one device."""
        if not needs_check(plan) and plan.batch_parts == 1:
            return
        try:
            training = training_of_job(JobParts(job))
            check_in_world(training, plan, world, skip=SKIP, suggest=lambda: Plan(axes=Axes(replicate=world.size)))
        except UnequalPlan as error:
            self.refused.add(plan, error)
            raise


def training_of_job(parts: JobParts) -> Training:
    """Returns the training of a job. Its model has no memory if it can be built so."""
    job, model = parts.job, parts.model
    return Training(
        model=model,
        optimizer=build_optimizer(job.optimizer, model),
        loss=bind(job.loss, "loss") if job.loss else None,
        sample_batch=parts.sample,
        target=job.data.target,
        clip_norm=job.train.clip_norm,
        seed=job.train.seed,
        timeout_s=job.train.timeout_s,
        build=partial(_build_without, job),
    )


def _build_without(job: Job, removed: tuple[str, ...]) -> nn.Module:
    """Returns the job's model with its initial weights, with `nn.Identity` in place of the removed blocks. Where the
    model can be built without memory, these never have any. Pretrained weights are not read."""
    try:
        model, recording = build_on_meta(lambda: construct_model(job), job.train.seed)
        if find_unreproducible(model, recording):
            raise InputError("a weight depends on how others were drawn")
    except MeshwrightError:
        model = build_initialized_model(job.model_copy(update={"train": _without_weights(job)}))
        _replace(model, removed)
        return model
    _replace(model, removed)
    materialize(model, recording, {}, job.train.seed, _CPU)
    freeze(model, job.train.freeze)
    return model


def _without_weights(job: Job) -> object:
    return job.train.model_copy(update={"weights": None})


def _replace(model: nn.Module, removed: tuple[str, ...]) -> None:
    for name in removed:
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._modules[key] = nn.Identity()
