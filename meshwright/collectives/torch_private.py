"""The private interfaces of torch that `meshwright/collectives` uses. They work on torch 2.11, 2.13 and 2.15."""

import torch
import torch.distributed as dist
from torch import UntypedStorage


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Returns the timeout of the group's CPU backend, in seconds."""
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def storage_key(storage: UntypedStorage) -> int:
    """Returns a number that identifies the storage as long as a `StorageWeakRef` to it exists."""
    key: int = storage._cdata
    return key


def move_to_shared_memory(storage: UntypedStorage) -> tuple[int, int]:
    """Moves the storage into a shared memory file without a name. Returns the file's descriptor and size in bytes.

    The public `share_memory_` does this only if the process has chosen the sharing strategy `file_descriptor`. With the
    other strategy it creates a file with a name."""
    file_descriptor, file_bytes = storage._share_fd_cpu_()
    return file_descriptor, file_bytes
