"""The peak memory of a process, and of all ranks."""

import resource
import sys

import torch
import torch.distributed as dist

from meshwright.launch.world import World


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def largest_peak_memory_bytes(world: World) -> int:
    """The largest peak memory of all ranks. All ranks call this together."""
    largest = torch.tensor(peak_memory_bytes(world.device))
    if world.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
