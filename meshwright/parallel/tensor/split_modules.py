"""The tensor axis: every rank holds its part of the layers that the model's structure says can be split, and the
model's own code runs on them unmodified.

`split_modules` decides nothing: which groups are split is the structure's, what the plan's `modules.splits` say goes
before it. Parameters become plain local tensors under their own names; `Layout` tells where they lie in the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.blocks.module_names import enclosing, within
from meshwright.errors import InputError, did_you_mean
from meshwright.parallel.exchange import Team
from meshwright.parallel.tensor.shard_view import Kind, ShardSpec
from meshwright.parallel.tensor.swap import Slot, has_fused_path, swap_while_running, without_fused_paths
from meshwright.parallel.weights.layout import Layout, lay_out, part_of, whole_shape
from meshwright.plan import Modules, Plan
from meshwright.profile.structure.split_rules import Shard
from meshwright.profile.structure.splits import Split, SplitGroup
from meshwright.profile.structure.structure import Structure


@dataclass(frozen=True)
class Bundle:
    """Splits that work together along one axis. The output of `lone` modules is made whole behind them."""

    splits: tuple[Split, ...]
    axis: str
    lone: tuple[str, ...] = ()


def split_modules(runs: Sequence[nn.Module], plan: Plan, structure: Structure, mesh: DeviceMesh) -> dict[str, Layout]:
    """Divides in place the parameters of what a rank runs, the model or its stages, which may share some; the layouts
    of those that are divided, by name."""
    teams: dict[str, Team] = {
        axis: _team(mesh, axis, plan) for axis in ("tensor", "replicate") if axis in (mesh.mesh_dim_names or ())
    }
    ties = {name: tie.parameters for tie in structure.ties for name in tie.parameters}
    layouts: dict[nn.Parameter, Layout] = {}
    # All before any is divided: a weight that stages share would show its part to the later ones.
    bundles = [list(_bundles(module, plan, structure)) for module in runs]
    for module, together in zip(runs, bundles, strict=True):
        check_names(plan.modules, module, structure)
        found = _Found(module, runs, ties, layouts)
        for bundle in together:
            if bundle.axis in teams:
                found.add(bundle, teams[bundle.axis])
        _install(module, found, teams, plan)
    named = (pair for module in runs for pair in module.named_parameters(remove_duplicate=False))
    return {name: layouts[parameter] for name, parameter in named if parameter in layouts}


def _team(mesh: DeviceMesh, axis: str, plan: Plan) -> Team:
    sequence = plan.modules.sequence and axis == "tensor"
    return Team(mesh.get_group(axis), mesh.get_local_rank(axis), getattr(plan.axes, axis), axis, sequence)


# ---- which layers


def _bundles(module: nn.Module, plan: Plan, structure: Structure) -> Iterator[Bundle]:
    named = {
        name: split
        for name, child in (module.named_modules() if plan.modules.splits else ())
        if (split := plan.modules.split_of(name)) and split.kind != "none" and _has_weight(child)
    }
    done: set[str] = set()
    for group in structure.splits:
        members = {split.module for split in group.splits}
        if members & named.keys():
            if all(
                name in named and _says(split, named[name].kind) for split in group.splits for name in [split.module]
            ):
                axes = {named[name].axis for name in members}
                if len(axes) == 1:
                    done |= members
                    yield _checked(group, axes.pop(), plan)
            continue
        if not any(_left_whole(split, plan.modules) for split in group.splits):
            yield _checked(group, "tensor", plan)
    for name, wanted in named.items():
        if name not in done:
            weight = module.get_submodule(name).weight
            assert isinstance(weight, nn.Parameter)
            outputs = 0 if isinstance(module.get_submodule(name), nn.Linear | nn.Embedding) else 1
            dim = 1 - outputs if wanted.kind == "row" else outputs
            assert wanted.kind != "none"
            alone = Split(name, f"{name}.weight", wanted.kind, dim, weight.shape[dim], name)
            yield Bundle((alone,), wanted.axis, (name,))


def _has_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


def _says(split: Split, kind: str) -> bool:
    return split.kind == kind or (split.kind == "heads" and kind == "column")


def _left_whole(split: Split, modules: Modules) -> bool:
    """Whether the plan leaves the module, or one around it, as it is."""
    if not modules.splits:
        return False
    return any((own := modules.split_of(name)) is not None and own.kind == "none" for name in enclosing(split.module))


def _checked(group: SplitGroup, axis: str, plan: Plan) -> Bundle:
    """A vocabulary of any size can be divided; heads and columns must be divided evenly."""
    ranks = getattr(plan.axes, axis)
    lone = tuple(split.module for split in group.splits if split.kind == "vocabulary") if axis == "replicate" else ()
    if any(split.kind == "vocabulary" for split in group.splits) or group.degree % ranks == 0 or axis == "replicate":
        return Bundle(group.splits, axis, lone)
    has = f"{group.degree} equal parts"
    if group.heads is not None:
        shared = "" if group.kv_heads in (None, group.heads) else f" and {group.kv_heads} key-value heads"
        has = f"{group.heads} heads{shared}"
    works = [str(size) for size in range(1, group.degree + 1) if group.degree % size == 0]
    raise InputError(
        f"plan.axes.{axis} is {ranks}, but {group.name} has {has}: choose {', '.join(works[:12])}, or leave it whole"
        f" with plan.modules.splits: {{{group.name}: {{kind: none}}}}"
    )


def check_splits(module: nn.Module, plan: Plan, structure: Structure) -> None:
    """Whether the axes divide what the plan divides, and every name in it is one of the model's."""
    check_names(plan.modules, module, structure)
    for bundle in _bundles(module, plan, structure):
        ranks = getattr(plan.axes, bundle.axis)
        if ranks == 1 and bundle.axis == "replicate":
            raise InputError(
                f"plan.modules.splits.{bundle.splits[0].module} is split over the replicate axis, but"
                " plan.axes.replicate is 1: raise it, or leave the split out"
            )


def check_names(modules: Modules, module: nn.Module, structure: Structure) -> None:
    """Every pattern of the plan names a module. Those of other pipeline stages are known from the structure."""
    if not modules.splits:
        return
    known = {name for name, _ in module.named_modules()} | set(structure.pieces)
    known |= {split.module for group in structure.splits for split in group.splits}
    known |= {name for chain in structure.wide for name in chain.modules}
    known |= {".".join(name.split(".")[:count]) for name in list(known) for count in range(1, name.count(".") + 1)}
    for pattern in modules.splits:
        only = Modules(splits={pattern: modules.splits[pattern]})
        if not any(only.split_of(name) for name in known):
            raise InputError(f"plan.modules.splits: the model has no module {pattern!r}{did_you_mean(pattern, known)}")


# ---- their parameters


class _Found:
    """What has been divided so far: layouts by parameter, of all `runs` of the rank, and slots of this `module`, one of
    them, by the modules while which they hold parts."""

    def __init__(
        self,
        module: nn.Module,
        runs: Sequence[nn.Module],
        ties: dict[str, tuple[str, ...]],
        layouts: dict[nn.Parameter, Layout],
    ) -> None:
        self.module = module
        self.runs = runs
        self.ties = ties
        self.layouts = layouts
        self.slots: dict[str, dict[tuple[int, str], Slot]] = {}
        self.made_whole: dict[str, set[Kind]] = {}

    def add(self, bundle: Bundle, team: Team) -> None:
        here = {split.parameter: name for split in bundle.splits if (name := self._name_here(split)) is not None}
        gone = [split.module for split in bundle.splits if split.parameter not in here]
        if not here:
            return
        if gone and any(split.kind != "vocabulary" for split in bundle.splits):
            raise InputError(
                f"plan.pipeline.cuts: {gone[0]} and {bundle.splits[0].module} are split along the {team.axis} axis"
                " together, but lie in different stages: cut elsewhere"
            )
        slots: list[tuple[str, Slot]] = []
        for split in bundle.splits:
            if split.parameter in here:
                own = [*self._divide(here[split.parameter], split, team)]
                slots += own
                self._hold(split.module, [slot for _, slot in own])
                if split.kind == "vocabulary" or split.module in bundle.lone:
                    kinds = self.made_whole.setdefault(split.module, set())
                    kinds.add("vocabulary" if split.kind == "vocabulary" else "features")
        for owner, slot in slots:
            self._hold(owner, [slot])
        around = reduce(_common, [owner for owner, _ in slots])
        self._hold(around, [slot for _, slot in slots])
        for owner, slot in slots:
            for name in _ancestors(owner):
                without_fused_paths(self.module.get_submodule(name))
                if has_fused_path(self.module.get_submodule(name)):
                    self._hold(name, [slot])

    def _name_here(self, split: Split) -> str | None:
        """What the parameter is called here: of a tied one this stage may hold the other end."""
        names = dict(self.module.named_parameters(remove_duplicate=False))
        known = (split.parameter, *self.ties.get(split.parameter, ()))
        return next((name for name in known if name in names), None)

    def _divide(self, name: str, split: Split, team: Team) -> Iterator[tuple[str, Slot]]:
        yield from self._divide_one(name, split, team)
        # Of a tied weight the bias is that of the layer, whichever name the weight has.
        owner, leaf = (split.module, "weight") if split.kind == "vocabulary" else name.rpartition(".")[::2]
        bias = f"{owner}.{leaf.replace('weight', 'bias')}" if owner else leaf.replace("weight", "bias")
        parameter = dict(self.module.named_parameters(remove_duplicate=False)).get(bias)
        # Its layout, where it was divided before under another name, is the same.
        size = None if parameter is None or bias == name else whole_shape(parameter, self.layouts.get(parameter))
        if split.kind != "row" and size == (split.size,):
            yield from self._divide_one(bias, replace(split, dim=0), team)

    def _divide_one(self, name: str, split: Split, team: Team) -> Iterator[tuple[str, Slot]]:
        parameter = self.module.get_parameter(name)
        if parameter not in self.layouts:
            layout = lay_out(parameter.shape, split.dim, split.parts, team.axis, team.ranks, team.rank)
            local = nn.Parameter(part_of(parameter.detach(), layout), parameter.requires_grad)
            local.__dict__.update(parameter.__dict__)
            self._put(local, parameter)
            self.layouts[local] = layout
            parameter = local
        mark = ShardSpec(
            _shard(split), team, "vocabulary" if split.kind == "vocabulary" else "features", _uneven(split)
        )
        for place, held in self.module.named_parameters(remove_duplicate=False):
            if held is parameter:
                owner, _, leaf = place.rpartition(".")
                yield owner, Slot(self.module.get_submodule(owner), leaf, mark, self.layouts[parameter].shape)

    def _put(self, local: nn.Parameter, parameter: nn.Parameter) -> None:
        """In the place of the parameter, wherever this rank holds it: what is tied stays one."""
        for owner in (owner for run in self.runs for owner in run.modules()):
            for leaf, held in owner._parameters.items():
                if held is parameter:
                    owner._parameters[leaf] = local

    def _hold(self, module: str, slots: list[Slot]) -> None:
        known = self.slots.setdefault(module, {})
        for slot in slots:
            known.setdefault((id(slot.owner), slot.name), slot)


def _shard(split: Split) -> Shard:
    if not split.parts:
        return Shard(split.dim, 1, split.size, 1)
    if _uneven(split):
        return Shard(split.dim, 0, split.size, 1)
    return Shard(split.dim, len(split.parts), split.parts[0], 1)


def _uneven(split: Split) -> tuple[int, ...]:
    return split.parts if len(set(split.parts)) > 1 else ()


def _common(left: str, right: str) -> str:
    """The innermost module that holds both."""
    while not (within(right, left) or left == ""):
        left = left.rpartition(".")[0]
    return left


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


# ---- into the model


def _install(module: nn.Module, found: _Found, teams: dict[str, Team], plan: Plan) -> None:
    if not found.slots:
        return
    every = tuple(teams.values())
    found.made_whole.setdefault("", set()).update({"sequence", "features", "vocabulary"})
    for name in {**found.slots, **found.made_whole}:
        kinds = found.made_whole.get(name, set())
        if plan.modules.loss:
            kinds = kinds - {"vocabulary"}
        slots = tuple(found.slots.get(name, {}).values())
        swap_while_running(module.get_submodule(name), name, slots, every, tuple(sorted(kinds)))
