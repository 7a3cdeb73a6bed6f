"""Which branches of a plan can live on ranks of their own, said before ranks start."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from meshwright.blocks.module_names import within
from meshwright.blocks.recompute import find_blocks
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.profile.structure.dataflow import Call, Flow
from meshwright.profile.structure.pieces import Pieces
from meshwright.profile.structure.structure import Structure


def apart(plan: Plan) -> bool:
    """Whether the plan has branches that several ranks could hold."""
    return bool(plan.modules.branches) and plan.axes.tensor > 1


def beside_branches(found: Structure, plan: Plan) -> Structure:
    """What can be split where branches are left whole."""
    if not apart(plan):
        return found
    inside = plan.modules.branches
    groups = [g for g in found.splits if not any(within(s.module, b) for s in g.splits for b in inside)]
    return replace(found, splits=tuple(groups))


def check_branches(plan: Plan, model: nn.Module, recorded: Callable[[], Flow]) -> None:
    """The model may lie on the meta device. Its flow is asked for where the plan has branches; where chance or data
    decide in training what runs, it is that of an evaluation."""
    if not apart(plan):
        return
    _check_names(plan, model)
    for name in plan.modules.branches:
        _check_parameters(name, model)
        _check_splits(name, plan, model)
        _check_blocks(name, plan, model)
    flow = recorded()
    for name in plan.modules.branches:
        _check_flow(name, flow)


def _refused(name: str, why: str) -> InputError:
    return InputError(f"plan.modules.branches.{name}: {why}")


def _check_names(plan: Plan, model: nn.Module) -> None:
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in plan.modules.branches:
        if name not in known:
            raise InputError(f"plan.modules.branches: the model has no module {name!r}{did_you_mean(name, known)}")
        outer = next((other for other in plan.modules.branches if other != name and within(name, other)), None)
        if outer is not None:
            raise _refused(name, f"it lies in {outer}, which is a branch too: name one of them")


def _check_parameters(name: str, model: nn.Module) -> None:
    own = {id(p): key for key, p in model.get_submodule(name).named_parameters()}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not within(other, name):
            raise _refused(
                name,
                f"{name}.{own[id(parameter)]} is tied to {other}, so they cannot lie on different ranks: leave the"
                " branch out, or untie them",
            )


def _check_splits(name: str, plan: Plan, model: nn.Module) -> None:
    for inner, _ in model.named_modules():
        split = plan.modules.split_of(inner) if within(inner, name) else None
        if split is not None and split.kind != "none":
            raise _refused(
                name, f"it lies on one rank, but plan.modules.splits divides {inner} among several: choose one of them"
            )


def _check_blocks(name: str, plan: Plan, model: nn.Module) -> None:
    if plan.memory.recompute == "none":
        return
    block = next((block for block in find_blocks(model) if block != name and within(name, block)), None)
    if block is not None:
        raise _refused(
            name,
            f"it lies in {block}, which plan.memory.recompute computes again as a whole: set recompute to none, or"
            " leave the branch out",
        )


def _check_flow(name: str, flow: Flow) -> None:
    calls = [call for call in flow.calls if call.module == name]
    if len(calls) != 1:
        times = "is never called" if not calls else f"is called {len(calls)} times"
        raise _refused(name, f"it {times} in a forward pass, and a branch is called exactly once: leave the branch out")
    (call,) = calls
    for user in _users_outside(name, call, flow):
        raise _refused(name, f"its weights are also used outside of it, in {user}: leave the branch out")
    handed = {flow.root(value) for value in call.inputs}
    trained = Pieces(flow, ()).trained
    for number in range(call.begin, call.end):
        op = flow.ops[number]
        where = flow.calls[op.call].module
        if any(_is_brought(flow, flow.root(value), call) for value in op.mutated):
            raise _refused(name, f"{where} overwrites in place ({op.name}) what the branch is given: copy it first")
        for value in map(flow.root, op.inputs):
            if trained[value] and value not in handed and _is_brought(flow, value, call):
                raise _refused(
                    name,
                    f"{where} uses ({op.name}) a result from outside that the branch is not given as an argument of"
                    " its call, in tuples, lists or dicts: hand it over so, or leave the branch out",
                )


def _users_outside(name: str, call: Call, flow: Flow) -> Iterator[str]:
    for number, op in enumerate(flow.ops):
        if call.begin <= number < call.end:
            continue
        for value in (flow.values[flow.root(value)] for value in op.inputs):
            if value.source in ("parameter", "buffer") and within(value.name, name):
                yield flow.calls[op.call].module or "the model's own forward pass"


def _is_brought(flow: Flow, value: int, call: Call) -> bool:
    """Whether it was there before the call, and is no weight or buffer."""
    found = flow.values[value]
    return found.source == "input" if found.op is None else found.op < call.begin
