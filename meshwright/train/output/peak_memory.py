"""The peak memory of a process, and of all ranks; and what is in memory by kind."""

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.weights.layout import local_tensor
from meshwright.processes.world import World


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


def memory_by_kind(module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """The bytes in memory now: weights (with buffers), gradients, optimizer state, and what is left, which in a forward
    or backward pass is mostly activations. On a CPU, the last one includes Python and the libraries."""
    parameters = list(module.parameters())
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    kinds = {
        "weights": _size([*parameters, *module.buffers()], device),
        "gradients": _size([p.grad for p in parameters if p.grad is not None], device),
        "optimizer state": _size(values, device),
    }
    in_use = torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident_bytes()
    return {**kinds, "activations and others": max(0, in_use - sum(kinds.values()))}


def _size(tensors: list[Tensor], device: torch.device) -> int:
    local = [local_tensor(tensor) for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.device.type == device.type)


def _resident_bytes() -> int:
    """The resident memory of this process now; its peak where Linux does not tell it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))
