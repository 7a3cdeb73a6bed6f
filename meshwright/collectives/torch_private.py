"""The private interfaces of torch that collectives use. They were seen to work on torch 2.11 and 2.13."""

import torch
import torch.distributed as dist
from torch import UntypedStorage


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Returns the timeout of the group's CPU backend."""
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def storage_key(storage: UntypedStorage) -> int:
    """Returns a number that identifies the storage as long as a `StorageWeakRef` to it exists."""
    key: int = storage._cdata
    return key


def move_to_shared_memory(storage: UntypedStorage) -> tuple[int, int]:
    """Moves the storage into a shared memory file without a name, and returns its file descriptor and size in bytes.

    `share_memory_` does the same, but only where the process has chosen the strategy `file_descriptor`: the other
    strategy creates files with names."""
    file_descriptor, file_bytes = storage._share_fd_cpu_()
    return file_descriptor, file_bytes
