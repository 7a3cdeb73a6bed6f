"""A model with gradients that is sharded by hand along every axis of a mesh, for tests of gathering, clipping and
saving."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.weights.layout import ParameterLayout, fill_local_shard, local_shard, shard_layout
from meshwright.plan import Plan

AXES: list[dict[str, int]] = [
    {"replicate": 4},
    {"shard": 4},
    {"tensor": 4},
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 2, "shard": 2},
    {"pipeline": 2, "replicate": 2},
]
STAGES = (("embed", "fused"), ("row", "norm", "scalar", "head"))
# Rows or columns that two or four ranks divide unequally; `fused` is a fused layer of three parts.
SPLITS: dict[str, tuple[int, tuple[int, ...]]] = {
    "fused.weight": (0, (6, 3, 2)),
    "fused.bias": (0, (6, 3, 2)),
    "row.weight": (1, ()),
    "embed.weight": (0, ()),
    "head.weight": (0, ()),
}


class FullModel(nn.Module):
    """`head` is tied to `embed`; one parameter has no gradient, one is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 9, bias=False)
        self.fused = nn.Linear(5, 11)
        self.row = nn.Linear(11, 5)
        self.norm = nn.BatchNorm1d(5)
        self.scalar = nn.ParameterDict({"value": nn.Parameter(torch.tensor(2.0))})
        self.head = nn.Linear(5, 9)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("this model is never called")


@dataclass(frozen=True)
class HandTied:
    """A parameter that several pipeline ranks have, with its name on this rank and the pipeline ranks that have it."""

    name: str
    local_name: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class ShardedModel:
    """The shards of one rank; `mesh` is None in one process."""

    module: nn.Module
    layouts: dict[str, ParameterLayout]
    tied: tuple[HandTied, ...]
    mesh: DeviceMesh | None


def whole_model(seed: int = 0) -> FullModel:
    torch.manual_seed(seed)
    model = FullModel().double()
    for name, parameter in model.named_parameters():
        parameter.grad = torch.randn_like(parameter) if name != "row.bias" else None
    for buffer in model.buffers():
        buffer.add_(torch.ones_like(buffer) * seed + 3)
    return model


def shard_by_hand(axes: dict[str, int], size: int, seed: int = 0) -> ShardedModel:
    """Returns this rank's shards of `whole_model(seed)`."""
    mesh = build_mesh(Plan.model_validate({"axes": axes}), "cpu", size)
    model = whole_model(seed)
    if mesh is None:
        return ShardedModel(model, {}, (), None)
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    tied = _cut(model, mesh)
    layouts = _split(model, mesh)
    if "shard" in axes:
        scalars = {p for p in model.parameters() if p.dim() == 0}
        data = mesh["replicate", "shard"] if "replicate" in axes else mesh["shard"]
        fully_shard(model, mesh=data, ignored_params=scalars)
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if name in gradients:
            gradient = torch.zeros_like(parameter, requires_grad=False)
            fill_local_shard(gradient, layouts.get(name), gradients[name])
            parameter.grad = gradient
    return ShardedModel(model, layouts, tied, mesh)


def _cut(model: FullModel, mesh: DeviceMesh) -> tuple[HandTied, ...]:
    if "pipeline" not in (mesh.mesh_dim_names or ()):
        return ()
    stage = mesh.get_local_rank("pipeline")
    for name in STAGES[1 - stage]:
        delattr(model, name)
    return (HandTied("embed.weight", ("embed.weight", "head.weight")[stage], (0, 1)),)


def _split(model: FullModel, mesh: DeviceMesh) -> dict[str, ParameterLayout]:
    if "tensor" not in (mesh.mesh_dim_names or ()):
        return {}
    layouts: dict[str, ParameterLayout] = {}
    shards: dict[int, nn.Parameter] = {}
    for name, (dim, parts) in SPLITS.items():
        owner, _, last = name.rpartition(".")
        if not hasattr(model, owner):
            continue
        module = model.get_submodule(owner)
        full = getattr(module, last)
        layout = shard_layout(full.shape, dim, parts, "tensor", mesh["tensor"].size(), mesh.get_local_rank("tensor"))
        # Tied parameters stay tied.
        shard = shards.setdefault(id(full), nn.Parameter(local_shard(full.detach(), layout)))
        setattr(module, last, shard)
        layouts[name] = layout
    return layouts


def local_parameter_bytes(module: nn.Module) -> int:
    local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(p.numel() * p.element_size() for p in local)


def is_equal_on_all_ranks(value: object) -> bool:
    """Returns whether all ranks have an equal value."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(rank_value == value for rank_value in values)
