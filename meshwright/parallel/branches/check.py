"""Checks, before ranks start, that each branch that a plan assigns to one rank can run there alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from meshwright.blocks.module_names import is_inside
from meshwright.blocks.recompute import find_blocks
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.profile.structure.dataflow import Dataflow, ModuleCall
from meshwright.profile.structure.pieces import ModulePieces
from meshwright.profile.structure.structure import Structure


def has_assigned_branches(plan: Plan) -> bool:
    """Whether the plan assigns branches to ranks, and there are several ranks to choose from."""
    return bool(plan.modules.branches) and plan.axes.tensor > 1


def without_branch_splits(structure: Structure, plan: Plan) -> Structure:
    """The structure without the splits inside of branches: a branch stays whole on its rank."""
    if not has_assigned_branches(plan):
        return structure
    branches = plan.modules.branches
    groups = [
        g for g in structure.splits if not any(is_inside(s.module, branch) for s in g.splits for branch in branches)
    ]
    return replace(structure, splits=tuple(groups))


def check_branches(plan: Plan, model: nn.Module, record: Callable[[], Dataflow]) -> None:
    """Raises an `InputError` if one of the plan's branches cannot run on one rank alone.

    The model may be on the meta device. `record` is called only if the plan has branches, and returns the model's
    dataflow: that of an evaluation where random numbers or data decide which modules run in training.
    """
    if not has_assigned_branches(plan):
        return
    _check_names(plan, model)
    for name in plan.modules.branches:
        _check_parameters(name, model)
        _check_splits(name, plan, model)
        _check_blocks(name, plan, model)
    flow = record()
    for name in plan.modules.branches:
        _check_dataflow(name, flow)


def _error(name: str, reason: str) -> InputError:
    return InputError(f"plan.modules.branches.{name}: {reason}")


def _check_names(plan: Plan, model: nn.Module) -> None:
    module_names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in plan.modules.branches:
        if name not in module_names:
            hint = did_you_mean(name, module_names)
            raise InputError(f"plan.modules.branches: the model has no module {name!r}{hint}")
        outer = next((other for other in plan.modules.branches if other != name and is_inside(name, other)), None)
        if outer is not None:
            raise _error(name, f"it lies in {outer}, which is a branch too: name one of them")


def _check_parameters(name: str, model: nn.Module) -> None:
    branch_parameters = {id(p): key for key, p in model.get_submodule(name).named_parameters()}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in branch_parameters and not is_inside(other, name):
            raise _error(
                name,
                f"{name}.{branch_parameters[id(parameter)]} is tied to {other}, so they cannot lie on different ranks:"
                " leave the branch out, or untie them",
            )


def _check_splits(name: str, plan: Plan, model: nn.Module) -> None:
    for inner, _ in model.named_modules():
        split = plan.modules.split_of(inner) if is_inside(inner, name) else None
        if split is not None and split.kind != "none":
            raise _error(
                name, f"it lies on one rank, but plan.modules.splits divides {inner} among several: choose one of them"
            )


def _check_blocks(name: str, plan: Plan, model: nn.Module) -> None:
    if plan.memory.recompute == "none":
        return
    block = next((block for block in find_blocks(model) if block != name and is_inside(name, block)), None)
    if block is not None:
        raise _error(
            name,
            f"it lies in {block}, which plan.memory.recompute computes again as a whole: set recompute to none, or"
            " leave the branch out",
        )


def _check_dataflow(name: str, flow: Dataflow) -> None:
    calls = [call for call in flow.calls if call.module == name]
    if len(calls) != 1:
        times = "is never called" if not calls else f"is called {len(calls)} times"
        raise _error(name, f"it {times} in a forward pass, and a branch is called exactly once: leave the branch out")
    (call,) = calls
    for user in _users_outside(name, call, flow):
        raise _error(name, f"its weights are also used outside of it, in {user}: leave the branch out")
    arguments = {flow.root(value) for value in call.inputs}
    depends_on_weights = ModulePieces(flow, ()).depends_on_weights
    for number in range(call.begin, call.end):
        operator = flow.operators[number]
        module = flow.calls[operator.call].module
        if any(_precedes(flow, flow.root(value), call) for value in operator.overwritten):
            reason = f"{module} overwrites in place ({operator.name}) what the branch is given: copy it first"
            raise _error(name, reason)
        for value in map(flow.root, operator.inputs):
            if depends_on_weights[value] and value not in arguments and _precedes(flow, value, call):
                raise _error(
                    name,
                    f"{module} uses ({operator.name}) a result from outside that the branch is not given as an argument"
                    " of its call: pass it as an argument, also within tuples, lists or dicts, or leave the branch out",
                )


def _users_outside(name: str, call: ModuleCall, flow: Dataflow) -> Iterator[str]:
    """The modules outside of the branch that use its weights or buffers."""
    for number, operator in enumerate(flow.operators):
        if call.begin <= number < call.end:
            continue
        for value in (flow.values[flow.root(value)] for value in operator.inputs):
            if value.source in ("parameter", "buffer") and is_inside(value.name, name):
                yield flow.calls[operator.call].module or "the model's own forward pass"


def _precedes(flow: Dataflow, number: int, call: ModuleCall) -> bool:
    """Whether the value existed before the call, and is no weight or buffer."""
    value = flow.values[number]
    return value.source == "input" if value.producer is None else value.producer < call.begin
