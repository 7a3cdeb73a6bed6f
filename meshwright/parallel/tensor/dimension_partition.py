"""`data.partition: dimension`: every rank of the tensor axis loads only its columns of the inputs, the first layer is
split by rows to match, and the partial sums are all-reduced.

    x · Wᵀ = Σ over ranks of x[:, columns of the rank] · W[:, columns of the rank]ᵀ           products._row
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import InputError
from meshwright.model_io.batch import ModelBatch
from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Modules, Split
from meshwright.profile.structure.split_rules import DividedDimension


def shard_input_columns(columns: Tensor, width: int, mesh: DeviceMesh) -> ShardView:
    """This rank's columns of an input, presented to the model as the full input of `width` columns."""
    process_group = mesh.get_group("tensor")
    group = AxisGroup(process_group, mesh.get_local_rank("tensor"), process_group.size())
    spec = ShardSpec(DividedDimension(columns.dim() - 1, 1, width, 1), group)
    return ShardView(columns, spec, (*columns.shape[:-1], width))


def layers_given_input(module: nn.Module, example: ModelBatch) -> list[str]:
    """The names of the linear layers that receive the model's first input itself, found by running the example."""
    first_input = next(iter(example.arguments), None)
    if not isinstance(first_input, Tensor):
        raise InputError(
            "data.partition is dimension, which divides the first tensor of a batch, but batches are"
            f" {'dicts' if example.keywords else 'no tensors'}: give pairs (features, target), or use batch"
        )
    names: list[str] = []

    def make_hook(name: str) -> object:
        def hook(layer: nn.Module, arguments: tuple[object, ...]) -> None:
            if arguments and _shows_all_of(arguments[0], first_input):
                names.append(name)

        return hook

    linear = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_pre_hook(make_hook(name)) for name, layer in linear]  # type: ignore[arg-type]
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(*example.arguments, **example.keywords)
    finally:
        module.train(training)
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(names))


def _shows_all_of(value: object, tensor: Tensor) -> bool:
    """Whether the value is the tensor, or a view of all of it."""
    return isinstance(value, Tensor) and value.data_ptr() == tensor.data_ptr() and value.numel() == tensor.numel()


def dimension_partition_plan(module: nn.Module, example: ModelBatch, ranks: int) -> Plan:
    """A plan in which all ranks divide the input columns, and only the layers that receive the input are split."""
    if ranks == 1:
        return Plan()
    first_layers = layers_given_input(module, example)
    if not any(first_layers):  # none, or the model itself, which has no name that a split could be given
        raise InputError(_NO_FIRST_LAYER)
    others = [name for name, layer in module.named_modules() if _has_matrix(layer) and name not in first_layers]
    splits = {name: Split(kind="row") for name in first_layers} | {name: Split(kind="none") for name in others}
    return Plan(axes=Axes(tensor=ranks), modules=Modules(splits=splits))


def check_dimension_partition(plan: Plan, module: nn.Module, example: ModelBatch) -> None:
    """Raises an `InputError` unless the plan splits by rows the layers that receive the input."""
    first_layers = layers_given_input(module, example)
    if not any(first_layers):
        raise InputError(_NO_FIRST_LAYER)
    if plan.world_size > 1 and plan.axes.tensor == 1:
        raise InputError(
            f"data.partition is dimension, which divides inputs over the tensor axis, but the plan ({plan.summary()})"
            " has none: set plan.axes.tensor, or data.partition to batch"
        )
    for name in first_layers:
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
