"""Sums the gradients of parameters that several pipeline ranks hold: each rank has computed a part of the gradient."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.parallel.pipeline.stages import LocalStages

Holders = tuple[int, ...]  # coordinates along the pipeline axis


class TiedGradients:
    """Sums the gradients of tied parameters over the pipeline ranks that hold them. It has a process group for every
    such set of ranks that this rank belongs to. All ranks of the mesh build it at the same time."""

    def __init__(self, local_stages: LocalStages, mesh: DeviceMesh) -> None:
        self._local_stages = local_stages
        self._groups = _process_groups(set(local_stages.holders_by_parameter.values()), mesh)

    def combine(self) -> None:
        """Leaves the summed gradient in every tied parameter; all holders call it together."""
        by_holders: dict[Holders, list[nn.Parameter]] = {}
        parameters = dict(self._local_stages.module.named_parameters())
        for tied in self._local_stages.tied:
            parameter = parameters[tied.local_name]
            if parameter.requires_grad:
                by_holders.setdefault(tied.holders, []).append(parameter)
        for holders in sorted(by_holders):
            _sum_gradients(by_holders[holders], self._groups[holders])


def _sum_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    ranks_with_gradient = torch.tensor(
        [float(p.grad is not None) for p in parameters], device=_local_tensor(parameters[0]).device
    )
    dist.all_reduce(ranks_with_gradient, group=group)
    for parameter, count in zip(parameters, ranks_with_gradient.tolist(), strict=True):
        if not count:
            continue  # no rank used it in this step: it stays without gradient, as on one device
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(_local_tensor(parameter.grad), group=group)


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _process_groups(holder_sets: set[Holders], mesh: DeviceMesh) -> dict[Holders, dist.ProcessGroup]:
    assert mesh.mesh_dim_names is not None
    axis = mesh.mesh_dim_names.index("pipeline")
    pipelines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()  # the ranks of each pipeline
    groups = {}
    for holders in sorted(holder_sets):
        if len(holders) == mesh.size(axis):
            groups[holders] = mesh.get_group("pipeline")
            continue
        for pipeline in pipelines:  # every rank must create every group, in the same order
            ranks = [pipeline[holder] for holder in holders]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[holders] = group
    return groups
