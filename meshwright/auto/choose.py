"""Chooses the plan of `mw.best_plan`: the fastest plan for a model that the executor can run."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.auto.decide import both_checks, why_unpredicted
from meshwright.auto.inputs import check_model_and_cluster, model_planning_inputs
from meshwright.auto.tuned import ModelToTune, checked_budget_s, variants_of
from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.data.randomness import preserve_generators
from meshwright.errors import InputError, MeshwrightError, NotPredictable
from meshwright.messages.exchange import broadcast_value
from meshwright.numbers.limits import check_count
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import make_constraints
from meshwright.plan_fields.effects import Numerics
from meshwright.plan_fields.groups import Axes
from meshwright.planner.constraints.apply import unconstrained
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.measured_search import measured_search
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import PricedPlan
from meshwright.processes.world import World, join
from meshwright.profile.tracing.step import LossFunction
from meshwright.train.tuning.ranks import TuningRequest
from meshwright.user.code import first_line


def choose_plan(inputs: PlanningInputs, profiles: Profiles) -> PricedPlan:
    """Returns the fastest plan that fits and that `inputs.check_plan` accepts. Raises an `InputError` if there is
    none."""
    return measured_search(inputs, profiles)[0].ranked[0]


def free_best(inputs: PlanningInputs, profiles: Profiles) -> PricedPlan | None:
    """Returns the best plan without the constraints of the inputs, which are those that `measured_search` returns. None
    if there are no constraints, or no such plan."""
    if not inputs.constraints:
        return None
    try:
        return search_with_offload(unconstrained(inputs), profiles).ranked[0]
    except InputError:
        return None


def best_plan(
    model: nn.Module,
    sample_batch: Any,
    *,
    global_batch: int,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    cluster: str | Cluster | None = None,
    allow: Numerics = "rounding",
    target: str | None = None,
    device: str | None = None,
    timeout_s: float = 600,
    check: Callable[[Plan], None] | None = None,
    fix: Mapping[str, Any] | None = None,
    avoid: Sequence[str] = (),
    max_memory: str | int | None = None,
    tune: float | None = None,
) -> Plan:
    """Returns the fastest plan for this model that `parallelize` can run. The model and the batch may be on the meta
    device. `optimizer` is a template for the optimizer; without it, the plan is for plain SGD. `allow` says how much
    the plan may change the numerical result: `same`, only the order of sums; `rounding`, also the last bits, by other
    kernels; `changes`, also the arithmetic, for example by computing in bf16.

    Without `cluster`, the plan is for the ranks that there are: those of the process group or of the launcher, or one
    rank if there is neither. If nothing can be predicted for the model, each of them is a replica, and a warning says
    why. `device` is `cuda` or `cpu`; None means `cuda` if there is a GPU. Rank 0 searches, and all
    ranks get its plan; they call this together, and wait at most `timeout_s` for it. `check` raises an `InputError` for
    plans that the caller's training loop cannot run.

    `fix` maps fields of a plan to the values that they must have: `{"axes.tensor": 4}` or `{"axes": {"tensor": 4}}`.
    `avoid` names axes, features or values that the plan must not have: `["pipeline", "recompute"]`. `max_memory` is
    what a plan may use of one device: bytes, or a text such as `"40GB"` (docs/constraints.md).

    Without `cluster`, a few steps of the best variants of the plan's `compute` fields are timed on copies of the model,
    among them eager steps and the compiled model, and the fastest is taken. This takes at most about `tune` seconds,
    None for 60, and changes nothing in the process. With 0, or if torch uses deterministic algorithms, predictions
    decide alone. The result is kept for the same model, shapes, devices and versions.

    >>> import torch, meshwright as mw
    >>> model = torch.nn.Linear(20, 5)
    >>> batch = (torch.randn(8, 20), torch.zeros(8, dtype=torch.long))
    >>> plan = mw.best_plan(model, batch, loss=torch.nn.functional.cross_entropy, global_batch=64, cluster="8xH100")
    >>> plan.world_size
    8
    >>> loss = torch.nn.functional.cross_entropy
    >>> plan = mw.best_plan(model, batch, loss=loss, global_batch=64, cluster="8xH100", fix={"axes.shard": 8})
    >>> plan.axes.shard
    8
    """
    check_count("global_batch", global_batch)
    check_model_and_cluster(model, "local" if cluster is None else cluster)
    constraints = make_constraints(fix, avoid, max_memory)
    budget_s = checked_budget_s(tune, cluster)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    world = join(kind, timeout_s)

    trained = ModelToTune(model, sample_batch, loss, optimizer, target, global_batch, world)
    request: TuningRequest | None = None  # of rank 0

    def search_here() -> Plan:
        nonlocal request
        inputs, profiles = _model_inputs(
            model,
            sample_batch,
            _cluster_of_ranks(world) if cluster is None else cluster,
            ranks=world.size if cluster is None else None,
            global_batch=global_batch,
            loss=loss,
            optimizer=optimizer,
            allow=allow,
            target=target,
            constraints=constraints,
        )
        if check is not None:
            inputs = replace(inputs, check_plan=both_checks(inputs.check_plan, check))
        plan = choose_plan(inputs, profiles).plan
        if cluster is None and budget_s and trained.can_be_timed(plan):
            request = trained.request(plan, variants_of(plan, inputs, profiles), budget_s)
        return plan

    def search_or_replicate() -> Plan:
        try:
            return search_here()
        except Exception as error:  # raised by the model's own code, on tensors without values or in real steps
            is_mistake = isinstance(error, MeshwrightError) and not isinstance(error, NotPredictable)
            if is_mistake or cluster is not None or constraints:
                raise
            return _unpredicted_plan(world, check, why_unpredicted(error))

    with preserve_generators():  # only rank 0 may draw random numbers here
        plan = _plan_of_rank_0(search_or_replicate, world)
        return plan if cluster is not None or not budget_s else trained.tuned(plan, request)


def _unpredicted_plan(world: World, check: Callable[[Plan], None] | None, reason: str) -> Plan:
    """Returns the plan in which every rank is a replica, for a model of which nothing can be predicted, and says so in
    a warning. Raises the `InputError` of `check` if the caller's loop cannot run this plan."""
    plan = Plan(axes=Axes(replicate=world.size))
    if check is not None:
        check(plan)
    warnings.warn(f"plan: {plan.summary()}, without a prediction: {reason}", stacklevel=5)
    return plan


def _model_inputs(
    model: nn.Module, sample_batch: Any, cluster: str | Cluster, *, ranks: int | None, **options: Any
) -> tuple[PlanningInputs, Profiles]:
    """Returns the inputs of a search. Plans must use exactly this number of `ranks`, unless it is None; their shares of
    a batch need not be equal then."""
    machines = find_cluster(cluster, measure_machine) if isinstance(cluster, str) else cluster
    inputs, profiles = model_planning_inputs(model, sample_batch, machines, **options)
    if ranks is None:
        return inputs, profiles

    def check_plan(plan: Plan) -> None:
        if plan.world_size != ranks:
            raise InputError(f"the plan is for {plan.world_size} ranks, but there are {ranks}")
        inputs.check_plan(plan)

    return replace(inputs, even_shares=False, check_plan=check_plan), profiles


def _cluster_of_ranks(world: World) -> Cluster:
    """Returns the devices of the ranks that there are, all of them on this machine."""
    if world.size != world.local_size:
        raise InputError(
            f"the {world.size} ranks are on {world.size // world.local_size} machines, whose network is not known:"
            " describe them with best_plan(…, cluster=…), for example '2x8xH100' for two machines with eight GPUs each"
        )
    if world.device.type == "cpu":
        return find_cluster(f"{world.size}xcpu", measure_machine)
    return find_cluster("local", measure_machine).with_device_count(world.size)


def _plan_of_rank_0(search_here: Callable[[], Plan], world: World) -> Plan:
    """Returns the plan that rank 0 finds, on every rank. If it finds none, all ranks raise an error."""
    if world.size == 1:
        return search_here()
    answer: dict[str, Any] = {}
    if world.rank == 0:
        try:
            answer["plan"] = search_here().model_dump(mode="json")
        except BaseException as error:
            broadcast_value({"error": first_line(error)})
            raise
    answer = broadcast_value(answer)
    if "error" in answer:
        raise InputError(f"rank 0 has found no plan: {answer['error']}")
    return Plan.model_validate(answer["plan"])
