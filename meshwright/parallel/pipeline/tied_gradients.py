"""Parameters that several pipeline ranks hold: each has a part of the gradient, and all get the sum."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.parallel.pipeline.stages import Cutting

Holders = tuple[int, ...]


class TiedGradients:
    """Holds a process group for every set of holders that this rank belongs to. All ranks of the mesh build one at
    the same time."""

    def __init__(self, cutting: Cutting, mesh: DeviceMesh) -> None:
        self._cutting = cutting
        self._groups = _groups(set(cutting.shared.values()), mesh)

    def combine(self) -> None:
        by_holders: dict[Holders, list[nn.Parameter]] = {}
        parameters = dict(self._cutting.module.named_parameters())
        for tied in self._cutting.tied:
            parameter = parameters[tied.local]
            if parameter.requires_grad:
                by_holders.setdefault(tied.holders, []).append(parameter)
        for holders in sorted(by_holders):
            _sum(by_holders[holders], self._groups[holders])


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    here = torch.tensor([float(p.grad is not None) for p in parameters], device=_local(parameters[0]).device)
    dist.all_reduce(here, group=group)
    for parameter, held in zip(parameters, here.tolist(), strict=True):
        if not held:
            continue  # used nowhere in this step: it stays without gradient, as on one device
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(_local(parameter.grad), group=group)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _groups(sets: set[Holders], mesh: DeviceMesh) -> dict[Holders, dist.ProcessGroup]:
    assert mesh.mesh_dim_names is not None
    axis = mesh.mesh_dim_names.index("pipeline")
    columns = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()  # the ranks of each pipeline
    found = {}
    for holders in sorted(sets):
        if len(holders) == mesh.size(axis):
            found[holders] = mesh.get_group("pipeline")
            continue
        for column in columns:  # every rank makes every group, in the same order
            ranks = [column[holder] for holder in holders]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found[holders] = group
    return found
