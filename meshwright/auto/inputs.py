"""Creates the inputs of a search for plans, from a job or from a model with a sample batch. `PlanningInputs.check_plan`
asks the executor whether it can run a plan. Therefore the search proposes only plans that can be run."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.model_io.batch import target_key
from meshwright.parallel.check import checker_of_plans
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import NONE, Constraints, make_constraints
from meshwright.plan_fields.effects import Numerics
from meshwright.planner.constraints.apply import constrained
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.profile.optimizer import optimizer_cost
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.tracing.step import LossFunction
from meshwright.progress import phase
from meshwright.train.build import build_data, sample_batch
from meshwright.train.check import facts_of
from meshwright.train.job_parts import JobParts
from meshwright.train.loop_checks.optimizer_trial import checker_of_optimizer
from meshwright.train.step.optimizer import build_optimizer, can_fuse_on_gpus
from meshwright.user.call import bind


def check_model_and_cluster(model: Any, cluster: Any) -> None:
    """Raises an `InputError` if the arguments of a function are no model and no cluster."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not an nn.Module")
    if not isinstance(cluster, str | Cluster):
        raise InputError(f"cluster is a {type(cluster).__name__}: give a name, such as '8xH100', or a Cluster")


def planning_inputs(
    parts: JobParts,
    cluster: Cluster,
    *,
    allow: Numerics | None = None,
    top: int = 1,
    even_shares: bool = True,
    notify: Callable[[str], None] = lambda line: None,
    constraints: Constraints | None = None,
) -> tuple[PlanningInputs, Profiles]:
    """Returns the planning inputs of a job, and the profiles of its model. If `allow` is None, it is that of the
    job. If the sample batch is generated because the job's data are missing, `notify` is called with a sentence that
    says so. If `constraints` is None, they are those of the job."""
    job, on_gpu = parts.job, cluster.kind == "cuda"
    with phase("reading the data and building the model"):
        training = planning_data(parts)
    structure, training_set = training.structure, training.training_set
    if training.is_generated and not job.data.synthetic:
        notify("data.root is not set: the shapes of a batch are taken from generated data")
    try:
        optimizer = build_optimizer(job.optimizer, structure.model)
    except (TypeError, ValueError) as error:
        raise InputError(f"optimizer: {error}") from error
    inputs = PlanningInputs(
        cluster,
        job.train.global_batch,
        optimizer_cost(optimizer, on_gpu),
        allow=allow or job.allow,
        top=top,
        even_shares=even_shares,
        check_plan=_checker(structure, optimizer, **facts_of(job), device=cluster.kind),
        epoch_samples=len(training_set) if hasattr(training_set, "__len__") and not training.is_generated else None,
        can_fuse_optimizer=on_gpu and _can_fuse(optimizer, structure.model),
        checkpoint_copies=job.checkpoint.asynchronous,
    )
    loss = bind(job.loss, "loss") if job.loss else None
    profiles = parts.once(f"profiles for {cluster.kind}", lambda: _profiles(structure, loss, on_gpu))
    return constrained(inputs, job.constraints if constraints is None else constraints), profiles


def model_planning_inputs(
    model: nn.Module,
    sample: Any,
    cluster: Cluster,
    *,
    global_batch: int,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    allow: Numerics = "rounding",
    target: str | None = None,
    constraints: Constraints = NONE,
) -> tuple[PlanningInputs, Profiles]:
    """Returns the planning inputs for a model, and the profiles of the model. Without an optimizer, they are for plain
    SGD."""
    on_gpu = cluster.kind == "cuda"
    structure = ModelStructure(model, sample, target_key(target, loss is not None))
    inputs = PlanningInputs(
        cluster,
        global_batch,
        optimizer_cost(optimizer, on_gpu),
        allow=allow,
        check_plan=_checker(structure, optimizer, device=cluster.kind),
        can_fuse_optimizer=on_gpu and optimizer is not None and _can_fuse(optimizer, model),
    )
    return constrained(inputs, constraints), _profiles(structure, loss, on_gpu)


def question_inputs(
    model: nn.Module,
    sample: Any,
    cluster: str | Cluster,
    *,
    fix: Mapping[str, Any] | None = None,
    avoid: Sequence[str] = (),
    max_memory: str | int | None = None,
    **options: Any,
) -> tuple[PlanningInputs, Profiles]:
    """Returns the planning inputs of a question about a model, with the constraints that `best_plan` has, too. The
    cluster may be named; this machine is then measured."""
    constraints = make_constraints(fix, avoid, max_memory)
    machines = find_cluster(cluster, measure_machine) if isinstance(cluster, str) else cluster
    return model_planning_inputs(model, sample, machines, constraints=constraints, **options)


def _checker(
    structure: ModelStructure, optimizer: torch.optim.Optimizer | None, **facts: Any
) -> Callable[[Plan], None]:
    check_structure, check_optimizer = checker_of_plans(structure, **facts), checker_of_optimizer(optimizer)

    def check_plan(plan: Plan) -> None:
        check_optimizer(plan)
        check_structure(plan)

    return check_plan


def _profiles(structure: ModelStructure, loss: LossFunction | None, on_gpu: bool) -> Profiles:
    model = _with_dense_gradients(structure.model)
    return Profiles(model, structure.sample, loss, structure.target, on_gpu, known_structure=structure)


def _with_dense_gradients(model: nn.Module) -> nn.Module:
    """Returns the model, or if some of its embeddings have sparse gradients, a copy with the same parameters and dense
    gradients. Sparse gradients cannot be traced, and dense ones take at least as long."""
    if not _has_sparse_gradients(model):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, shared)
    for module in copy.modules():
        if getattr(module, "sparse", False) is True:
            module.sparse = False  # type: ignore[assignment]
    return copy


def _has_sparse_gradients(model: nn.Module) -> bool:
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def _can_fuse(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether fused kernels of GPUs can update the model. They do not take sparse gradients."""
    return can_fuse_on_gpus(optimizer) and not _has_sparse_gradients(model)


@dataclass(frozen=True)
class PlanningData:
    """The training set of a job, whether it is generated data, and the structure of the job's model on a batch of
    it."""

    training_set: Any
    is_generated: bool
    structure: ModelStructure


def planning_data(parts: JobParts) -> PlanningData:
    """Returns the training set and the model structure with which a job is planned. If the files of the training set
    are missing and the job does not name a folder, the training set is generated data, because planning needs only the
    shapes of a batch."""
    return parts.once("planning_data", lambda: _planning_data(parts))


def _planning_data(parts: JobParts) -> PlanningData:
    job = parts.job
    try:
        data = parts.data[0]
    except InputError as missing:
        if job.data.synthetic or job.data.root is not None:
            raise
        generated = job.model_copy(update={"data": job.data.model_copy(update={"synthetic": True})})
        try:
            data = build_data(generated)[0]
        except MeshwrightError:
            raise missing from None
        sample = sample_batch(job, data)
        return PlanningData(
            data, True, ModelStructure(parts.model, sample, target_key(job.data.target, job.loss is not None))
        )
    return PlanningData(data, job.data.synthetic, parts.structure)
