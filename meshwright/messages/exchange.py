"""Collectives of plain values, for small messages between ranks. They are sent as JSON (plain_values.py): torch's own
collectives of objects send pickles, which execute code on the rank that reads them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.messages.plain_values import from_text, to_text


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks of the group, on every rank. Without a process group, there is one rank.

    A rank whose value is not plain raises NotPlainError, and the other ranks wait for it until it exits. Where a value
    is a user's, the ranks first tell each other whether it is plain."""
    if not dist.is_initialized():
        return [value]
    data, device = to_bytes_tensor(value), _device(group)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: data.numel()] = data
    received = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(received, padded.to(device), group=group)
    return [from_bytes_tensor(tensor[:length]) for tensor, length in zip(received, lengths, strict=True)]


def broadcast_value(value: Any, group: dist.ProcessGroup | None = None, source: int = 0) -> Any:
    """Returns the value of the group's rank `source`, on every rank. The other ranks' values are not used. Without a
    process group, it returns `value`."""
    if not dist.is_initialized():
        return value
    device, is_source = _device(group), dist.get_rank(group) == source
    data = to_bytes_tensor(value if is_source else None).to(device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, group=group, group_src=source)
    received = data if is_source else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(received, group=group, group_src=source)
    return from_bytes_tensor(received)


def to_bytes_tensor(value: Any) -> Tensor:
    """Returns the value's text as a tensor of bytes, for a message over another connection."""
    return torch.frombuffer(bytearray(to_text(value).encode()), dtype=torch.uint8)


def from_bytes_tensor(data: Tensor) -> Any:
    """Returns the value that `to_bytes_tensor` wrote."""
    return from_text(data.cpu().numpy().tobytes())


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device of tensors that the group can send: the CPU, or the current GPU if its only backend is NCCL."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")
