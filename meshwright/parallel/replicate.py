"""The replicate axis: every rank holds the whole model, and gradients are averaged while backward runs."""

from torch import nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.plan import MIB


def replicate(module: nn.Module, mesh: DeviceMesh, bucket_bytes: int) -> DistributedDataParallel:
    """DDP over the `replicate` axis of the mesh.

    `find_unused_parameters` does two things for us: a parameter that some step does not use needs no word
    from the user, and DDP keeps its first bucket layout. Otherwise it rebuilds its buckets after the first
    step, and a resumed run would sum in another order than the undisturbed one.
    """
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group("replicate"),
        bucket_cap_mb=bucket_bytes / MIB,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )


def align_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all ranks the buffers of the first one, as DDP does before each forward pass of training: what
    evaluation uses and a checkpoint holds is then what training goes on with."""
    group = mesh.get_group("replicate")
    for buffer in module.buffers():
        broadcast(buffer, group=group, group_src=0)
