"""The norm of the whole model's gradient under any plan, and clipping by it.

Every element of the gradient is counted on exactly one rank. A tensor that an axis replicates is counted on the axis's
first rank; a parameter that is tied across pipeline stages is counted on the first stage that holds it.

    norm = sqrt( all_reduce( Σ over counted tensors of |local shard|² ) )            global_norm()
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.collectives.reducer import real_numbers
from meshwright.parallel.torch_private import foreach_mul_, foreach_norm
from meshwright.parallel.weights.layout import ParameterLayout, TiedLayout, local_tensor

NamedGradients = Iterable[tuple[str, Tensor | None]]


@torch.no_grad()
def global_norm(
    named_gradients: NamedGradients,
    layouts: Mapping[str, ParameterLayout],
    tied: Sequence[TiedLayout],
    mesh: DeviceMesh | None,
) -> Tensor:
    """The 2-norm of the whole model's gradient, in fp64 and the same on every rank. Every rank has to call it.
    Gradients that are None are left out."""
    gradients = [(name, gradient) for name, gradient in named_gradients if gradient is not None]
    device = _device(gradients, mesh)
    counted = [
        real_numbers(local_tensor(gradient))
        for name, gradient in gradients
        if mesh is None or _is_counted_here(name, gradient, layouts, tied, mesh)
    ]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensors in group_by_dtype_and_device(counted):
        norms = torch.stack(foreach_norm(tensors, 2.0, dtype=_norm_dtype(tensors[0])))
        total += norms.double().square().sum().to(device)
    if mesh is not None:
        dist.all_reduce(total)  # a mesh holds all ranks
    return total.sqrt()


@torch.no_grad()
def clip_(
    named_gradients: NamedGradients,
    layouts: Mapping[str, ParameterLayout],
    tied: Sequence[TiedLayout],
    mesh: DeviceMesh | None,
    max_norm: float,
) -> Tensor:
    """Scales the gradients in place so that the norm of the whole model's gradient is at most `max_norm`, as
    `torch.nn.utils.clip_grad_norm_` does on one process. Returns the norm before scaling."""
    gradients = list(named_gradients)
    norm = global_norm(gradients, layouts, tied, mesh)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local_gradients = [local_tensor(gradient) for _, gradient in gradients if gradient is not None]
    for tensors in group_by_dtype_and_device(local_gradients):
        foreach_mul_(tensors, factor.to(tensors[0].device, tensors[0].dtype))
    return norm


@torch.no_grad()
def clip_values_(parameters: Iterable[Tensor], limit: float) -> None:
    """Limits every element of the gradients of these parameters, which may be shards, to [-limit, limit]."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_tensor(parameter.grad).clamp_(-limit, limit)


def _is_counted_here(
    name: str, gradient: Tensor, layouts: Mapping[str, ParameterLayout], tied: Sequence[TiedLayout], mesh: DeviceMesh
) -> bool:
    layout = layouts.get(name)
    sharding_axes = {layout.axis} if layout else set()
    if isinstance(gradient, DTensor):
        # FSDP2 shards experts over the shard axis, and other weights over all of these.
        sharding_axes |= {"shard", "expert", "context"}
    for axis in mesh.mesh_dim_names or ():
        coordinate = mesh.get_local_rank(axis)
        if axis == "pipeline":
            holders = next((tie.holders for tie in tied if name in (tie.local_name, tie.name)), ())
            if holders and coordinate != min(holders):
                return False
        elif axis not in sharding_axes and coordinate != 0:
            return False
    return True


def _norm_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which squares are summed. On the CPU it is fp64, because the CPU adds squares one after the other:
    in fp32 the norm of a large tensor would be wrong by parts in a thousand, and by another amount for its shards."""
    return torch.float64 if tensor.device.type == "cpu" or tensor.dtype == torch.float64 else torch.float32


def group_by_dtype_and_device(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """The tensors in lists, one list for each dtype and device, as torch's `_foreach_` functions want them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups.values()


def _device(gradients: Sequence[tuple[str, Tensor]], mesh: DeviceMesh | None) -> torch.device:
    """The device on which the squared norm is all-reduced. A pipeline stage without any gradient needs one too, because
    it takes part in the all-reduce."""
    if gradients:
        return local_tensor(gradients[0][1]).device
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
