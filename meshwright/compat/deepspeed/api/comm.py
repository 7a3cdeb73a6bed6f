"""`deepspeed.comm`: the collectives and questions about ranks that scripts call. They are those of torch.distributed;
a process that no launcher has started is a group of one rank."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # noqa: F401  (scripts import them from here)
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    get_process_group_ranks,
    irecv,
    is_available,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from meshwright.messages.exchange import all_gather_values, broadcast_value
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.processes.world import is_launched, join

_TIMEOUT = timedelta(minutes=30)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = _TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the process group of the launcher, if there is none yet. NCCL and Gloo are chosen by the device of a
    tensor, whatever `dist_backend` is."""
    if dist.is_initialized():
        return
    if init_method is not None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        admit_own_user_only()
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    elif is_launched():
        join("cuda" if torch.cuda.is_available() else "cpu", timeout.total_seconds())
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def is_initialized() -> bool:
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    return join("cuda" if torch.cuda.is_available() else "cpu", _TIMEOUT.total_seconds()).local_rank


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return dist.barrier(group, async_op) if dist.is_initialized() else None


def destroy_process_group(group: Any = None) -> None:
    dist.destroy_process_group(group)


def broadcast_object_list(object_list: list[Any], src: int, group: Any = None, device: Any = None) -> None:
    """Gives all ranks the values of rank `src`, which are plain values and tensors."""
    object_list[:] = broadcast_value(list(object_list), group, src)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Gives each rank the values of all ranks, which are plain values and tensors."""
    object_list[:] = all_gather_values(obj, group)


def has_all_gather_into_tensor() -> bool:
    return True


def log_summary(*_: Any, **__: Any) -> None:
    """Does nothing: communication is not logged."""


allgather_fn = all_gather_into_tensor
inference_all_reduce = all_reduce
