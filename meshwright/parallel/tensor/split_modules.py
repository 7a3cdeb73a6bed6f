"""Splits the parameters of a model's layers over the tensor axis, or over the replicate axis where the plan says so.
The model's own code runs on them unmodified.

Which layers are split together follows from the model's structure (`profile/structure`), unless the plan's
`modules.splits` says otherwise. Parameters become plain local tensors under their own names; a `ParameterLayout` tells
which index ranges of the full parameter each of them holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.blocks.module_names import enclosing_modules, is_inside
from meshwright.errors import InputError, did_you_mean
from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.tensor.parameter_swap import (
    ParameterSwap,
    disable_nested_tensors,
    has_fused_path,
    swap_parameters_in_forward,
)
from meshwright.parallel.tensor.shard_view import ShardKind, ShardSpec
from meshwright.parallel.weights.layout import ParameterLayout, local_shard, shard_layout, whole_shape
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Modules, Split
from meshwright.profile.structure.split_rules import DividedDimension
from meshwright.profile.structure.splits import ParameterSplit, SplitGroup
from meshwright.profile.structure.structure import Structure


@dataclass(frozen=True)
class CoupledSplits:
    """Splits along one axis that only work together, such as the two layers of a feed-forward block. The outputs of
    `gathered_modules` are gathered right after these modules."""

    splits: tuple[ParameterSplit, ...]
    axis: str
    gathered_modules: tuple[str, ...] = ()


def split_modules(
    models: Sequence[nn.Module], plan: Plan, structure: Structure, mesh: DeviceMesh
) -> dict[str, ParameterLayout]:
    """Splits in place the parameters of the model, or of this rank's pipeline stages, which may share some. Returns the
    layouts of the split parameters by name."""
    groups: dict[str, AxisGroup] = {
        axis: _axis_group(mesh, axis, plan) for axis in ("tensor", "replicate") if axis in (mesh.mesh_dim_names or ())
    }
    ties = {name: tie.parameters for tie in structure.ties for name in tie.parameters}
    layouts: dict[nn.Parameter, ParameterLayout] = {}
    # Before any parameter is split: later stages would see the local shape of a weight that they share with an earlier.
    coupled_by_model = [list(_coupled_splits(model, plan, structure)) for model in models]
    for model, coupled_splits in zip(models, coupled_by_model, strict=True):
        check_names(plan.modules, model, structure)
        splitter = _ModelSplitter(model, models, ties, layouts)
        for coupled in coupled_splits:
            if coupled.axis in groups:
                splitter.split(coupled, groups[coupled.axis])
        splitter.install_swaps(tuple(groups.values()), plan)
    named = (pair for model in models for pair in model.named_parameters(remove_duplicate=False))
    return {name: layouts[parameter] for name, parameter in named if parameter in layouts}


def _axis_group(mesh: DeviceMesh, axis: str, plan: Plan) -> AxisGroup:
    sequence_parallel = plan.modules.sequence and axis == "tensor"
    size = getattr(plan.axes, axis)
    return AxisGroup(mesh.get_group(axis), mesh.get_local_rank(axis), size, axis, sequence_parallel)


# ---- which layers are split


def _coupled_splits(model: nn.Module, plan: Plan, structure: Structure) -> Iterator[CoupledSplits]:
    """Yields the splits that the plan makes. A group of the structure is split together if the plan says nothing about
    its modules, or agrees with the structure on all of them. Other modules that the plan names are split one by one."""
    plan_splits = {
        name: split
        for name, module in (model.named_modules() if plan.modules.splits else ())
        if (split := plan.modules.split_of(name)) and split.kind != "none" and _has_matrix(module)
    }
    split_as_group: set[str] = set()
    for group in structure.splits:
        members = {split.module for split in group.splits} if plan_splits else set()
        if members & plan_splits.keys():
            if all(s.module in plan_splits and _agrees(s, plan_splits[s.module].kind) for s in group.splits):
                axes = {plan_splits[name].axis for name in members}
                if len(axes) == 1:
                    split_as_group |= members
                    yield _checked_group(group, axes.pop(), plan)
            continue
        if not plan.modules.splits or not any(_is_excluded(split, plan.modules) for split in group.splits):
            yield _checked_group(group, "tensor", plan)
    for name, plan_split in plan_splits.items():
        if name not in split_as_group:
            yield _single_split(model, name, plan_split)


def _single_split(model: nn.Module, name: str, plan_split: Split) -> CoupledSplits:
    module = model.get_submodule(name)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    output_dim = 0 if isinstance(module, nn.Linear | nn.Embedding) else 1
    dim = 1 - output_dim if plan_split.kind == "row" else output_dim
    assert plan_split.kind != "none"
    split = ParameterSplit(name, f"{name}.weight", plan_split.kind, dim, weight.shape[dim], name)
    return CoupledSplits((split,), plan_split.axis, (name,))


def _has_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


def _agrees(split: ParameterSplit, kind: str) -> bool:
    """Whether the structure's split is of the kind that the plan names."""
    return split.kind == kind or (split.kind == "heads" and kind == "column")


def _is_excluded(split: ParameterSplit, modules: Modules) -> bool:
    """Whether the plan leaves the module, or one that encloses it, whole."""
    plan_splits = (modules.split_of(name) for name in enclosing_modules(split.module))
    return any(plan_split is not None and plan_split.kind == "none" for plan_split in plan_splits)


def _checked_group(group: SplitGroup, axis: str, plan: Plan) -> CoupledSplits:
    """Returns the group's splits. Raises an `InputError` if the ranks of the tensor axis do not divide its heads or
    columns evenly. A vocabulary of any size can be split."""
    ranks = getattr(plan.axes, axis)
    vocabulary = tuple(split.module for split in group.splits if split.kind == "vocabulary")
    gathered = tuple(split.module for split in group.splits if split.communication == "all_gather")
    if vocabulary or group.degree % ranks == 0 or axis == "replicate":
        return CoupledSplits(group.splits, axis, (*gathered, *(vocabulary if axis == "replicate" else ())))
    parts = f"can be split into {group.degree} equal parts"
    if group.heads is not None:
        key_value = "" if group.kv_heads in (None, group.heads) else f" and {group.kv_heads} key-value heads"
        parts = f"has {group.heads} heads{key_value}"
    divisors = [str(size) for size in range(1, group.degree + 1) if group.degree % size == 0]
    raise InputError(
        f"plan.axes.{axis} is {ranks}, but {group.name} {parts}: choose {', '.join(divisors[:12])}, or leave it"
        f" whole with plan.modules.splits: {{{group.name}: {{kind: none}}}}"
    )


def check_splits(model: nn.Module, plan: Plan, structure: Structure) -> None:
    """Raises an `InputError` if the ranks do not divide what the plan splits, or the plan names an unknown module."""
    check_names(plan.modules, model, structure)
    splits = list(_coupled_splits(model, plan, structure))
    if plan.axes.tensor > 1 and not splits and not plan.modules.splits and not plan.modules.branches:
        raise InputError(
            f"plan.axes.tensor is {plan.axes.tensor}, but there is no layer to split, so its ranks would all compute"
            " the same: set axes.tensor to 1, or name layers in plan.modules.splits"
        )


def check_names(modules: Modules, model: nn.Module, structure: Structure) -> None:
    """Raises an `InputError` if a pattern of the plan names no module. The names of modules in other pipeline stages
    come from the structure."""
    if not modules.splits:
        return
    names = {name for name, _ in model.named_modules()} | set(structure.pieces)
    names |= {split.module for group in structure.splits for split in group.splits}
    names |= {name for chain in structure.wide_chains for name in chain.modules}
    names |= {".".join(name.split(".")[:count]) for name in list(names) for count in range(1, name.count(".") + 1)}
    for pattern in modules.splits:
        only = Modules(splits={pattern: modules.splits[pattern]})
        if not any(only.split_of(name) for name in names):
            raise InputError(f"plan.modules.splits: the model has no module {pattern!r}{did_you_mean(pattern, names)}")


# ---- their parameters


class _ModelSplitter:
    """Splits parameters of one `model` of this rank, which may share some with the rank's other `models`.

    `layouts` has all parameters that were split so far. `swaps` has, for each module by name, the parameters that are
    replaced by shard views while this module runs, and `gathered_kinds` what is gathered in its output.
    """

    def __init__(
        self,
        model: nn.Module,
        models: Sequence[nn.Module],
        ties: dict[str, tuple[str, ...]],
        layouts: dict[nn.Parameter, ParameterLayout],
    ) -> None:
        self.model = model
        self.models = models
        self.ties = ties
        self.layouts = layouts
        self.swaps: dict[str, dict[tuple[int, str], ParameterSwap]] = {}
        self.gathered_kinds: dict[str, set[ShardKind]] = {}

    def split(self, coupled: CoupledSplits, group: AxisGroup) -> None:
        local_names = {s.parameter: name for s in coupled.splits if (name := self._local_name(s)) is not None}
        missing = [split.module for split in coupled.splits if split.parameter not in local_names]
        if not local_names:
            return
        if missing and any(split.kind != "vocabulary" for split in coupled.splits):
            raise InputError(
                f"plan.pipeline.cuts: {missing[0]} and {coupled.splits[0].module} are split along the {group.axis} axis"
                " together, but lie in different stages: cut elsewhere"
            )
        swaps: list[tuple[str, ParameterSwap]] = []  # with the name of the module that owns the parameter
        for split in coupled.splits:
            if split.parameter in local_names:
                layer_swaps = [*self._split_layer(local_names[split.parameter], split, group)]
                swaps += layer_swaps
                self._swap_while_running(split.module, [swap for _, swap in layer_swaps])
                if split.kind == "vocabulary" or split.module in coupled.gathered_modules:
                    kinds = self.gathered_kinds.setdefault(split.module, set())
                    kinds.add("vocabulary" if split.kind == "vocabulary" else "features")
        self._swap_in_enclosing_modules(swaps)

    def _swap_in_enclosing_modules(self, swaps: list[tuple[str, ParameterSwap]]) -> None:
        """Code of an enclosing module may use a parameter directly, without calling the module that owns it."""
        for owner, swap in swaps:
            self._swap_while_running(owner, [swap])
        innermost = reduce(_common_ancestor, [owner for owner, _ in swaps])
        self._swap_while_running(innermost, [swap for _, swap in swaps])
        for owner, swap in swaps:
            for name in _ancestors(owner):
                disable_nested_tensors(self.model.get_submodule(name))
                if has_fused_path(self.model.get_submodule(name)):
                    self._swap_while_running(name, [swap])

    def _local_name(self, split: ParameterSplit) -> str | None:
        """The name of the parameter in this stage, which may hold it under the name that it is tied to. None if the
        stage does not hold it."""
        local_names = dict(self.model.named_parameters(remove_duplicate=False))
        tied_names = (split.parameter, *self.ties.get(split.parameter, ()))
        return next((name for name in tied_names if name in local_names), None)

    def _split_layer(self, name: str, split: ParameterSplit, group: AxisGroup) -> Iterator[tuple[str, ParameterSwap]]:
        """Splits the weight, and the bias of a layer whose outputs are split."""
        yield from self._split_parameter(name, split, group)
        # The bias belongs to the layer, under whichever name the layer's weight is tied.
        owner, leaf = (split.module, "weight") if split.kind == "vocabulary" else name.rpartition(".")[::2]
        bias = f"{owner}.{leaf.replace('weight', 'bias')}" if owner else leaf.replace("weight", "bias")
        parameter = dict(self.model.named_parameters(remove_duplicate=False)).get(bias)
        # A bias that was already split under another name has its full shape in its layout.
        shape = None if parameter is None or bias == name else whole_shape(parameter, self.layouts.get(parameter))
        if split.kind != "row" and shape == (split.size,):
            yield from self._split_parameter(bias, replace(split, dim=0), group)

    def _split_parameter(
        self, name: str, split: ParameterSplit, group: AxisGroup
    ) -> Iterator[tuple[str, ParameterSwap]]:
        parameter = self.model.get_parameter(name)
        if parameter not in self.layouts:
            layout = shard_layout(parameter.shape, split.dim, split.parts, group.axis, group.size, group.rank)
            local = nn.Parameter(local_shard(parameter.detach(), layout), parameter.requires_grad)
            local.__dict__.update(parameter.__dict__)
            self._replace_parameter(parameter, local)
            self.layouts[local] = layout
            parameter = local
        kind: ShardKind = "vocabulary" if split.kind == "vocabulary" else "features"
        spec = ShardSpec(_divided_dimension(split), group, kind, _unequal_parts(split))
        for tied_name, tied in self.model.named_parameters(remove_duplicate=False):
            if tied is parameter:
                owner, _, leaf = tied_name.rpartition(".")
                full_shape = self.layouts[parameter].shape
                yield owner, ParameterSwap(self.model.get_submodule(owner), leaf, spec, full_shape)

    def _replace_parameter(self, parameter: nn.Parameter, local: nn.Parameter) -> None:
        """Replaces the parameter under all its names in all models of this rank, so that ties stay ties."""
        for owner in (owner for model in self.models for owner in model.modules()):
            for leaf, candidate in owner._parameters.items():
                if candidate is parameter:
                    owner._parameters[leaf] = local

    def _swap_while_running(self, module: str, swaps: list[ParameterSwap]) -> None:
        module_swaps = self.swaps.setdefault(module, {})
        for swap in swaps:
            module_swaps.setdefault((id(swap.owner), swap.name), swap)

    def install_swaps(self, groups: tuple[AxisGroup, ...], plan: Plan) -> None:
        """Wraps the `forward` of every module that needs it. What leaves the model is gathered, except that with
        `plan.modules.loss` the loss is given logits that are split by vocabulary. A module inside of a piece of another
        stage, whose weight this stage has under another name, does not run here: it belongs to the copy of the model
        from which shapes are inferred."""
        if not self.swaps:
            return
        self.gathered_kinds.setdefault("", set()).update({"sequence", "features", "vocabulary"})
        local_modules = dict(self.model.named_modules(remove_duplicate=False))
        for name in filter(local_modules.__contains__, {**self.swaps, **self.gathered_kinds}):
            kinds = self.gathered_kinds.get(name, set())
            if plan.modules.loss:
                kinds = kinds - {"vocabulary"}
            swaps = tuple(self.swaps.get(name, {}).values())
            swap_parameters_in_forward(local_modules[name], name, swaps, groups, tuple(sorted(kinds)))


def _divided_dimension(split: ParameterSplit) -> DividedDimension:
    if not split.parts:
        return DividedDimension(split.dim, 1, split.size, 1)
    if _unequal_parts(split):
        return DividedDimension(split.dim, 0, split.size, 1)
    return DividedDimension(split.dim, len(split.parts), split.parts[0], 1)


def _unequal_parts(split: ParameterSplit) -> tuple[int, ...]:
    """The sizes of a fused layer's parts if they are not all equal, otherwise an empty tuple."""
    return split.parts if len(set(split.parts)) > 1 else ()


def _common_ancestor(left: str, right: str) -> str:
    """The innermost module that contains both."""
    while not (is_inside(right, left) or left == ""):
        left = left.rpartition(".")[0]
    return left


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name
