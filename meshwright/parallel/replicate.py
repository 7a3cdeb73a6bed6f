"""The replicate axis: every rank holds the whole model, and gradients are averaged while backward runs."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.plan import MIB

DATA_AXES = ("replicate", "shard")


def replicate(
    module: nn.Module,
    mesh: DeviceMesh,
    bucket_bytes: int,
    ignored: Collection[str] = (),
    travelling: torch.dtype | None = None,
) -> DistributedDataParallel:
    """DDP over the `replicate` axis of the mesh; parameters called `ignored` are neither averaged nor made equal.
    Gradients travel in the type `travelling`, where it is not None.

    `find_unused_parameters` does two things for us: a parameter that some step does not use needs no word
    from the user, and DDP keeps its first bucket layout. Otherwise it rebuilds its buckets after the first
    step, and a resumed run would sum in another order than the undisturbed one.
    """
    if ignored:
        names = [*ignored, *(f".{name}" for name in ignored if "." not in name)]  # DDP's own name of the root's
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    group = mesh.get_group("replicate")
    model = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=bucket_bytes / MIB,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
    if travelling is not None:
        model.register_comm_hook(group, _in_bf16 if travelling == torch.bfloat16 else _in_fp16)
    return model


def _in_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As PyTorch's own hook, which DDP refuses by its name where there is no NCCL: Gloo can do it too."""
    found: torch.futures.Future[torch.Tensor] = default_hooks._compress_hook(torch.bfloat16, state, bucket)
    return found


def _in_fp16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    found: torch.futures.Future[torch.Tensor] = default_hooks._compress_hook(torch.float16, state, bucket)
    return found


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
