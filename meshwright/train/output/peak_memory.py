"""The peak memory of a process."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
