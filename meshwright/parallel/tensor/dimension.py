"""Inputs that are divided by features: every rank of the tensor axis reads its columns, the first layer is split by
rows to match, and the partial sums are added up.

    x · Wᵀ = Σ over ranks of x[:, own columns] · W[:, own columns]ᵀ                     part_products._row
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.batch import Example
from meshwright.errors import InputError
from meshwright.parallel.exchange import Team
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView
from meshwright.plan import Axes, Modules, Plan, Split
from meshwright.profile.structure.split_rules import Shard


def part_of_input(columns: Tensor, width: int, mesh: DeviceMesh) -> ShardView:
    """This rank's columns of an input, which looks whole to the model."""
    group = mesh.get_group("tensor")
    team = Team(group, mesh.get_local_rank("tensor"), group.size())
    mark = ShardSpec(Shard(columns.dim() - 1, 1, width, 1), team)
    return ShardView(columns, mark, (*columns.shape[:-1], width))


def first_layers(module: nn.Module, example: Example) -> list[str]:
    """The linear layers that are given the first input itself."""
    given = next(iter(example.arguments), None)
    if not isinstance(given, Tensor):
        raise InputError(
            "data.partition is dimension, which divides the first tensor of a batch, but batches are"
            f" {'dicts' if example.keywords else 'no tensors'}: give pairs (features, target), or use batch"
        )
    found: list[str] = []

    def look(name: str) -> object:
        def hook(layer: nn.Module, arguments: tuple[object, ...]) -> None:
            if arguments and _same(arguments[0], given):
                found.append(name)

        return hook

    linear = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_pre_hook(look(name)) for name, layer in linear]  # type: ignore[arg-type]
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(*example.arguments, **example.keywords)
    finally:
        module.train(training)
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(found))


def _same(value: object, given: Tensor) -> bool:
    """The tensor, or a view of all of it."""
    return isinstance(value, Tensor) and value.data_ptr() == given.data_ptr() and value.numel() == given.numel()


def dimension_plan(module: nn.Module, example: Example, ranks: int) -> Plan:
    """All ranks divide the input, and nothing else is split."""
    if ranks == 1:
        return Plan()
    first = first_layers(module, example)
    if not any(first):  # none, or the model itself, which has no name that a split could be given
        raise InputError(_NO_FIRST_LAYER)
    others = [name for name, layer in module.named_modules() if _has_matrix(layer) and name not in first]
    splits = {name: Split(kind="row") for name in first} | {name: Split(kind="none") for name in others}
    return Plan(axes=Axes(tensor=ranks), modules=Modules(splits=splits))


def check_dimension(plan: Plan, module: nn.Module, example: Example) -> None:
    """Whether the plan divides the layers that see the input as the input is divided."""
    first = first_layers(module, example)
    if not any(first):
        raise InputError(_NO_FIRST_LAYER)
    if plan.world_size > 1 and plan.axes.tensor == 1:
        raise InputError(
            f"data.partition is dimension, which divides inputs over the tensor axis, but the plan ({plan.summary()})"
            " has none: set plan.axes.tensor, or data.partition to batch"
        )
    for name in first:
        split = plan.modules.split_of(name)
        if plan.axes.tensor > 1 and (split is None or split.kind != "row" or split.axis != "tensor"):
            raise InputError(
                f"data.partition is dimension, but the plan does not split {name}, which is given the input, by rows:"
                f" set plan.modules.splits: {{{name}: {{kind: row}}}}"
            )


_NO_FIRST_LAYER = (
    "data.partition is dimension, but no linear layer inside the model is given the first input itself: use batch, or"
    " begin the model with an nn.Linear"
)


def _has_matrix(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2
