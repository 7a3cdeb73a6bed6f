"""`hvd.init`, `hvd.shutdown`, and the questions about ranks and about what Horovod was built with."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.compat.horovod.process_sets import ProcessSet, init_process_sets
from meshwright.compat.horovod.state import NOT_INITIALIZED, horovod


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the other ranks. `comm` are the ranks that take part (None: all), or a communicator of mpi4py.
    `process_sets` are made at the start; `"dynamic"` is accepted, and `add_process_set` works without it, too."""
    horovod.init(comm)
    init_process_sets(process_sets)


def shutdown() -> None:
    """Leaves the other ranks. `init` can be called again."""
    horovod.shutdown()


def is_initialized() -> bool:
    return horovod.is_initialized


def rank() -> int:
    return horovod.placement.rank


def size() -> int:
    return horovod.placement.size


def local_rank() -> int:
    return horovod.placement.local_rank


def local_size() -> int:
    return horovod.placement.local_size


def cross_rank() -> int:
    return horovod.placement.cross_rank


def cross_size() -> int:
    return horovod.placement.cross_size


def is_homogeneous() -> bool:
    """Whether every machine has the same number of ranks."""
    return horovod.placement.local_size * horovod.placement.cross_size == horovod.placement.size


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Rank 0 writes a Chrome trace to this file until `stop_timeline`; the other ranks write nothing."""
    if not horovod.is_initialized:
        raise ValueError(NOT_INITIALIZED)
    if rank() == 0:
        horovod.timeline.open(file_path, mark_cycles)


def stop_timeline() -> None:
    if not horovod.is_initialized:
        raise ValueError(NOT_INITIALIZED)
    horovod.timeline.close()


def mpi_threads_supported() -> bool:
    raise ValueError("Horovod MPI is not enabled: tensors go through shared memory, Gloo and NCCL here.")


def mpi_enabled() -> bool:
    return False


def mpi_built() -> bool:
    return False


def gloo_enabled() -> bool:
    return True


def gloo_built() -> bool:
    return True


def nccl_built() -> int:
    """NCCL's version as a number such as 22703 if GPUs can use it, otherwise 0."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    nccl: Any = torch.cuda.nccl
    major, minor, patch = nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None
