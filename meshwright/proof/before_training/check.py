"""Checks a training under a plan before it begins: in ranks that run already, or in ranks that are started for it."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.data.randomness import preserve_generators
from meshwright.errors import InputError, RankError, UnequalPlan
from meshwright.messages.exchange import broadcast_value
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.progress import phase, say
from meshwright.proof.before_training.decide import Decision, decide, make_request
from meshwright.proof.before_training.kept import keep
from meshwright.proof.before_training.plan_kind import small_plan
from meshwright.proof.before_training.training import Training
from meshwright.proof.proof import Proof
from meshwright.proof.prove import AvailableRanks, prove_in_new_ranks, prove_in_running_ranks, work_folder
from meshwright.proof.request import ProofRequest
from meshwright.proof.shrink import shrink
from meshwright.proof.torch_private import process_groups
from meshwright.train.session import Session
from meshwright.user.code import first_line

# A difference is looked for again with so many times as many samples: with very few, a loss that compares samples may
# have gradients that consist of rounding errors only.
MORE_SAMPLES = 8
PrepareSession = Callable[[Session], None]


@dataclass(frozen=True)
class Outcome:
    """The result of a check. `line` tells the user what was checked; None if it was kept from an earlier start.
    `difference` says what differs, and is None if nothing does."""

    line: str | None
    difference: str | None = None


def check_in_new_ranks(
    training: Training, plan: Plan, available: AvailableRanks, prepare_session: PrepareSession | None = None
) -> Outcome:
    """Checks in ranks that are started for it, on this machine. A plan for more ranks is shrunk. `prepare_session` is
    that of a `ProofRequest`."""
    begin = time.monotonic()
    small, _ = shrink(small_plan(plan), available.count)
    with phase("checking the plan against one device"):
        decision = decide(training, small, torch.device(available.device))
        if decision.kept or decision.problem:
            return _unchecked(plan, decision)
        try:
            step = None
            for times in (1, MORE_SAMPLES):
                request = _request(training, small, decision, times, step, prepare_session)
                with work_folder(None) as folder:
                    proof = prove_in_new_ranks(request, available.device, folder)
                if proof.equal:
                    break
                step = _step_of_difference(proof)
        except (InputError, RankError) as error:  # what the training itself meets again, or what only the check does
            return _unchecked(plan, replace(decision, problem=first_line(error)))
    return _outcome(plan, decision, proof, time.monotonic() - begin)


def check_in_running_ranks(
    training: Training, plan: Plan, world: World, prepare_session: PrepareSession | None = None
) -> Outcome:
    """Checks in the ranks of this world, which all call this together. The result is the same on every rank."""
    begin = time.monotonic()
    small = small_plan(plan)
    with phase("checking the plan against one device"), _undisturbed(world):
        plain = broadcast_value(decide(training, small, world.device).to_plain() if world.rank == 0 else None)
        decision = Decision.from_plain(plain)
        if decision.kept or decision.problem:
            return _unchecked(plan, decision)
        proof, problem = None, None
        try:
            step = None
            for times in (1, MORE_SAMPLES):
                request = _request(training, small, decision, times, step, prepare_session)
                with tempfile.TemporaryDirectory(prefix="meshwright-check-") as folder:
                    proof = prove_in_running_ranks(request, world, Path(folder))
                step = broadcast_value(_step_of_difference(proof) if proof else None)
                if step is None:
                    break
        except InputError as error:  # raised on every rank: the plan cannot run, or not on the small model
            problem = first_line(error)
    outcome = Outcome(None)
    if problem is not None:
        outcome = _unchecked(plan, replace(decision, problem=problem))
    elif proof is not None:
        outcome = _outcome(plan, decision, proof, time.monotonic() - begin)
    return Outcome(**broadcast_value(vars(outcome) if world.rank == 0 else None))


def _request(
    training: Training,
    plan: Plan,
    decision: Decision,
    times: int,
    operators_of_step: int | None,
    prepare_session: PrepareSession | None,
) -> ProofRequest:
    request = make_request(training, plan, decision, times)
    if plan.compute.compile != "none":  # compiled code cannot be recorded
        operators_of_step = None
    return replace(request, operators_of_step=operators_of_step, prepare_session=prepare_session)


def _step_of_difference(proof: Proof) -> int | None:
    """The step that differs; None if no step does."""
    return max(1, proof.first_difference.step) if proof.first_difference else None


@contextmanager
def _undisturbed(world: World) -> Iterator[None]:
    """Restores this rank's random generators at the end, and leaves the process groups that were made within the
    context."""
    before, device = process_groups(), world.device
    gpu_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with preserve_generators():
            yield
    finally:
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, device)
        for group in process_groups():
            if group not in before:
                dist.destroy_process_group(group)


def _unchecked(plan: Plan, decision: Decision) -> Outcome:
    """The outcome of a check that was not made, because its result was kept or because it could not be made."""
    if decision.problem is None:
        return Outcome(None)
    return Outcome(f"not checked whether {plan.summary()} trains the same model as one device: {decision.problem}")


def _outcome(plan: Plan, decision: Decision, proof: Proof, seconds: float) -> Outcome:
    if not proof.equal:
        return Outcome(None, describe_difference(proof))
    error = proof.max_relative_error
    kept = decision.digest is not None and keep(decision.digest, plan.summary(), error, seconds)
    return Outcome(
        f"checked that {plan.summary()} trains the same model as one device: equal to {error:.1g}, {seconds:.1f} s"
        + ("; kept for the next start" if kept else "")
    )


def describe_difference(proof: Proof) -> str:
    """Returns what differs first between the plan and one device, and why."""
    first = proof.first_difference
    assert first is not None
    cause = f"{first.cause}: {first.explanation}".replace("_", " ") if first.cause else "no cause was found"
    operator = f"; {first.operator}" if first.operator else ""
    differs = _what_differs(first.what, first.parameter)
    return f"in step {max(1, first.step)}, {differs} off by {first.error:.2g} ({cause}{operator})"


def _what_differs(what: str, name: str | None) -> str:
    """What differs, in words with a verb. `name` is that of a buffer or weight."""
    if not name:
        return f"the {what} is"
    if what == "loss":
        return f"the loss and the gradient of {name} are"
    return f"the {what} {name} is" if what in ("buffer", "weight") else f"the {what} of {name} is"


def raise_if_unequal(plan: Plan, outcome: Outcome, instead: Plan | None, skip: str) -> None:
    """Raises `UnequalPlan` if the check has found a difference. `instead` is the fastest plan that needs no check, or
    was found equal; `skip` says how to train without a check."""
    if outcome.difference is None:
        return
    alternative = f"the fastest plan that trains the same model is {instead.summary()}; " if instead else ""
    raise UnequalPlan(
        f"the plan ({plan.summary()}) does not train the same model as one device: {outcome.difference}: {alternative}"
        f"{skip} trains it nevertheless"
    )


def tell(outcome: Outcome, rank: int = 0) -> None:
    """Prints what was checked, on rank 0."""
    if outcome.line and rank == 0:
        say(outcome.line)
