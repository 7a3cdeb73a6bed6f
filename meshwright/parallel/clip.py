"""The norm of the whole model's gradient under any plan, and clipping by it.

Every number of the whole gradient is counted on exactly one rank: where an axis does not divide a tensor, on the
axis's first rank; of copies on several pipeline stages, on the first stage that holds one.

    norm = sqrt( all_reduce( Σ over counted tensors of |local part|² ) )            global_norm()
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.parallel.weights.layout import Layout, Tied, local_of

NamedGradients = Iterable[tuple[str, Tensor | None]]


@torch.no_grad()
def global_norm(
    named_gradients: NamedGradients,
    layouts: Mapping[str, Layout],
    tied: Sequence[Tied],
    mesh: DeviceMesh | None,
) -> Tensor:
    """In fp64, the same on every rank; collective over all ranks. Gradients that are None are left out."""
    given = [(name, gradient) for name, gradient in named_gradients if gradient is not None]
    device = _device(given, mesh)
    counted = [
        local_of(gradient) for name, gradient in given if mesh is None or _counts(name, gradient, layouts, tied, mesh)
    ]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for held in by_type(counted):
        norms = torch.stack(torch._foreach_norm(held, 2.0, dtype=_summing(held[0])))
        total += norms.double().square().sum().to(device)
    if mesh is not None:
        dist.all_reduce(total)  # a mesh holds all ranks
    return total.sqrt()


@torch.no_grad()
def clip_(
    named_gradients: NamedGradients,
    layouts: Mapping[str, Layout],
    tied: Sequence[Tied],
    mesh: DeviceMesh | None,
    max_norm: float,
) -> Tensor:
    """Scales the gradients in place so that their norm is at most `max_norm`, and returns the norm they had; as
    `torch.nn.utils.clip_grad_norm_` on one process."""
    given = list(named_gradients)
    norm = global_norm(given, layouts, tied, mesh)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for held in by_type([local_of(gradient) for _, gradient in given if gradient is not None]):
        torch._foreach_mul_(held, factor.to(held[0].device, held[0].dtype))
    return norm


def _counts(name: str, gradient: Tensor, layouts: Mapping[str, Layout], tied: Sequence[Tied], mesh: DeviceMesh) -> bool:
    layout = layouts.get(name)
    divided = {layout.axis} if layout else set()
    if isinstance(gradient, DTensor):
        divided.add("shard")
    for axis in mesh.mesh_dim_names or ():
        place = mesh.get_local_rank(axis)
        if axis == "pipeline":
            copies = next((tie.holders for tie in tied if name in (tie.local, tie.name)), ())
            if copies and place != min(copies):
                return False
        elif axis not in divided and place != 0:
            return False
    return True


def _summing(tensor: Tensor) -> torch.dtype:
    """On the CPU squares are added one after the other: in fp32, a large tensor's norm would be off by parts in a
    thousand, and differently for parts than for the whole."""
    return torch.float64 if tensor.device.type == "cpu" or tensor.dtype == torch.float64 else torch.float32


def by_type(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Lists of one dtype and device, as functions on many tensors at once want them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups.values()


def _device(given: Sequence[tuple[str, Tensor]], mesh: DeviceMesh | None) -> torch.device:
    """A stage may have no gradient at all, but takes part in the sum."""
    if given:
        return local_of(given[0][1]).device
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
