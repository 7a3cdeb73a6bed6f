"""What commands and sessions call before they train: the check of plans that divide or cut the model, or that of plans
which copy it. Both raise `UnequalPlan`, and tell in one line what was checked."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.errors import UnequalPlan
from meshwright.messages.exchange import broadcast_value
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.progress import phase, say
from meshwright.proof.before_training.batch_state import find_batch_state, find_changed_parameter
from meshwright.proof.before_training.check import (
    PrepareSession,
    check_in_new_ranks,
    check_in_running_ranks,
    raise_if_unequal,
    tell,
)
from meshwright.proof.before_training.mixing.check import check_mixing
from meshwright.proof.before_training.plan_kind import UnequalDivisions, needs_check
from meshwright.proof.before_training.training import Training
from meshwright.proof.prove import available_ranks

SuggestPlan = Callable[[], Plan | None]
"""Returns the fastest plan that divides neither the model nor its sequences, None if none is known."""


def fastest_equal_plan(search: Callable[[Callable[[Plan], None]], Plan], check: Callable[[Plan], None]) -> Plan:
    """Returns the fastest plan that the check does not refuse. `search` returns the fastest of the plans for which a
    function raises no `InputError`. Ranks that run already call this together."""
    unequal = UnequalDivisions()
    while True:
        plan = search(unequal)
        try:
            check(plan)
            return plan
        except UnequalPlan as error:
            if not dist.is_initialized() or dist.get_rank() == 0:
                say(f"{error}; auto takes the next best plan")
            unequal.add(plan, error)


def check_here(
    training: Training,
    plan: Plan,
    *,
    device: str,
    skip: str,
    suggest: SuggestPlan | None = None,
    prepare_session: PrepareSession | None = None,
) -> None:
    """Checks a training before its ranks are started on this machine. `device` is cpu or cuda. `skip` says how a user
    trains without the check."""
    if not needs_check(plan):
        _check_batch_state(training, plan, skip, None)
    check_mixing(training, plan, skip, None, torch.device(device))
    if not needs_check(plan):
        return
    outcome = check_in_new_ranks(training, plan, available_ranks(plan, None, device), prepare_session)
    tell(outcome)
    if outcome.difference is not None:
        raise_if_unequal(plan, outcome, suggest() if suggest else None, skip)


def check_in_world(
    training: Training,
    plan: Plan,
    world: World,
    *,
    skip: str,
    suggest: SuggestPlan | None = None,
    prepare_session: PrepareSession | None = None,
) -> None:
    """Checks a training in the ranks that run already; all of them call this together, and all raise the same error.
    `suggest` is called on every rank, or on none."""
    if plan.world_size != world.size:  # an error that the plan's execution describes
        return
    if not needs_check(plan):
        _check_batch_state(training, plan, skip, world)
    check_mixing(training, plan, skip, world, world.device)
    if not needs_check(plan):
        return
    outcome = check_in_running_ranks(training, plan, world, prepare_session)
    tell(outcome, world.rank)
    if outcome.difference is not None:
        raise_if_unequal(plan, outcome, suggest() if suggest else None, skip)


def _check_batch_state(training: Training, plan: Plan, skip: str, world: World | None) -> None:
    """Raises `UnequalPlan` if the forward pass changes state by the samples that it sees, and ranks see different
    ones. `world` is None if the ranks do not run yet."""
    if plan.data_ranks == 1 or plan.gradients.local_steps > 1 or plan.gradients.updates != "synchronous":
        return
    with phase("looking for state that follows the batch"):
        found = _describe_state(training, plan) if world is None or world.rank == 0 else None
    found = found if world is None else broadcast_value(found)
    if found is not None:
        raise UnequalPlan(
            f"the plan ({plan.summary()}) does not train the same model as one device: the forward pass {found};"
            f" {skip} trains it nevertheless"
        )


def _describe_state(training: Training, plan: Plan) -> str | None:
    """Returns what the forward pass changes that is not the same on one device, and what to do; None if nothing is."""
    if state := find_batch_state(training):
        return (
            f"changes {state} by the samples that it sees, and each rank sees only its own: compute it from the samples"
            " of all ranks, choose a plan without the axes replicate and shard, or train on one device"
        )
    if plan.axes.shard > 1 and (parameter := find_changed_parameter(training)):
        return (
            f"writes to the parameter {parameter}, of which it has a gathered copy only, because the shard axis divides"
            " it: make it a buffer, or choose a plan without the shard axis"
        )
    return None
