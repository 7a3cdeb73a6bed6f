"""The expert axis: divides the experts of a model over ranks, in place.

The axis lies within the data ranks, which have different samples. All other weights are replicated or sharded over all
data ranks; an expert's weights are on one rank of each group of `axes.expert` ranks:

    mesh        replicate / expert × expert                without a shard axis
                replicate × shard / expert × expert        with a shard axis, which expert has to divide
    gradients   of experts: mean over the ranks of replicate and shard in this mesh; of other weights: over all three
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.expert.listed import ListedExperts, RemoteExpert
from meshwright.parallel.expert.loads import ExpertLoads
from meshwright.parallel.expert.stacked import StackedExperts
from meshwright.parallel.mesh import token_group
from meshwright.parallel.weights.layout import ParameterLayout, local_shard, shard_layout, whole_on_one_rank
from meshwright.plan import Plan
from meshwright.profile.experts import ExpertLayer, find_expert_layers

AXIS = "expert"


@dataclass(frozen=True)
class DividedExperts:
    """The experts of this rank. `layouts` has, by name, the layouts of the weights of all experts."""

    layouts: dict[str, ParameterLayout]
    loads: ExpertLoads


def divide_experts(models: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh, device: torch.device) -> DividedExperts:
    """Divides the experts of the models (pipeline stages of this rank, or the whole model) in place."""
    group = AxisGroup(mesh.get_group(AXIS), mesh.get_local_rank(AXIS), plan.axes.expert, AXIS)
    loads = ExpertLoads(group, token_group(mesh), device)
    layouts: dict[str, ParameterLayout] = {}
    for model in models:
        for layer in find_expert_layers(model):
            divide = _divide_stacked if layer.kind == "stacked" else _divide_list
            layouts |= divide(model, layer, group, loads)
    return DividedExperts(layouts, loads)


def _divide_stacked(
    model: nn.Module, layer: ExpertLayer, group: AxisGroup, loads: ExpertLoads
) -> dict[str, ParameterLayout]:
    module: Any = model.get_submodule(layer.module)
    layouts = {}
    for name in layer.weights:
        own_name = name.rpartition(".")[2]
        whole = getattr(module, own_name)
        layout = shard_layout(whole.shape, 0, (), AXIS, group.size, group.rank)
        shard = nn.Parameter(local_shard(whole.detach(), layout), requires_grad=whole.requires_grad)
        setattr(module, own_name, shard)
        layouts[name] = layout
    module.forward = StackedExperts(layer.module, module, layer.experts, group, loads)
    return layouts


def _divide_list(
    model: nn.Module, layer: ExpertLayer, group: AxisGroup, loads: ExpertLoads
) -> dict[str, ParameterLayout]:
    module = model.get_submodule(layer.module)
    layouts: dict[str, ParameterLayout] = {}
    experts: list[nn.Module] = []
    local = layer.experts // group.size
    for number, name in enumerate(layer.weights):
        expert = model.get_submodule(name)
        layouts |= {f"{name}.{key}": whole_on_one_rank(value, AXIS) for key, value in expert.state_dict().items()}
        if number // local != group.rank:
            expert = RemoteExpert()
            parent, _, key = name.rpartition(".")
            model.get_submodule(parent)._modules[key] = expert
        experts.append(expert)
    module.forward = ListedExperts(layer.module, module, experts, group, loads)
    return layouts


def divided_layers(module: nn.Module) -> list[nn.Module]:
    """The modules with stacked weights of which `divide_experts` has divided the experts."""
    return [layer for layer in module.modules() if isinstance(vars(layer).get("forward"), StackedExperts)]


def divided_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the experts' weights of a module of which `divide_experts` has divided the experts. FSDP2 may have
    replaced them by shards."""
    for layer in module.modules():
        forward = vars(layer).get("forward")
        if isinstance(forward, StackedExperts):
            yield from layer.parameters(recurse=False)
        elif isinstance(forward, ListedExperts):
            for expert in forward.local_experts:
                yield from expert.parameters()


def expert_placement(weight: nn.Parameter, ranks: int) -> Shard | None:
    """How FSDP2 shards weights of stacked experts over these ranks; None for its default, the first dimension. With
    fewer experts than ranks, some would hold whole experts and others nothing: then it is the second dimension."""
    return Shard(1) if weight.shape[0] % ranks and weight.shape[1] % ranks == 0 else None
