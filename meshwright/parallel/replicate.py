"""The replicate axis: every rank holds the whole model, and gradients are averaged while backward runs."""

from collections.abc import Collection, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.plan import MIB

DATA_AXES = ("replicate", "shard")


def replicate(
    module: nn.Module, mesh: DeviceMesh, bucket_bytes: int, ignored: Collection[str] = ()
) -> DistributedDataParallel:
    """DDP over the `replicate` axis of the mesh; parameters called `ignored` are neither averaged nor made equal.

    `find_unused_parameters` does two things for us: a parameter that some step does not use needs no word
    from the user, and DDP keeps its first bucket layout. Otherwise it rebuilds its buckets after the first
    step, and a resumed run would sum in another order than the undisturbed one.
    """
    if ignored:
        names = [*ignored, *(f".{name}" for name in ignored if "." not in name)]  # DDP's own name of the root's
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group("replicate"),
        bucket_cap_mb=bucket_bytes / MIB,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )


def align_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all data ranks the buffers of the first one, as DDP does before each forward pass of training: what
    evaluation uses and a checkpoint holds is then what training goes on with."""
    align_over(module, [mesh.get_group(axis) for axis in DATA_AXES if axis in (mesh.mesh_dim_names or ())])


def align_over(module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """From the first rank of each group to its others, one group after the other: all have the first rank's."""
    buffers = [buffer.detach() for buffer in module.buffers()]
    if buffers:
        for group in groups:
            dist._broadcast_coalesced(group, buffers, 25 * MIB, 0)
