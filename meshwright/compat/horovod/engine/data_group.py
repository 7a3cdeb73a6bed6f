"""`DataGroup`: the connections through which the ranks of one process set exchange tensors. CPU ranks on one machine
sum in shared memory. Everything else goes through Gloo for CPU tensors and NCCL for GPUs. Connections are made when
they are first needed; all ranks need them in the same operation, because they run the same operations in one order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.shared_memory import storages
from meshwright.collectives.shared_memory.reducer import RankLinks, SharedMemoryReducer
from meshwright.collectives.shared_memory.segment import this_process
from meshwright.collectives.shared_memory.steps import TYPES
from meshwright.compat.horovod.engine.torch_private import RawGroup
from meshwright.errors import InputError
from meshwright.messages.plain_values import from_text, to_text

_LARGEST_BUFFER_BYTES = 64 * 2**20
_WIDER = {torch.int32: torch.int64, torch.int16: torch.int64, torch.int8: torch.int64, torch.uint8: torch.int64}
_GLOO_WIDER = {torch.int16: torch.int32}


@dataclass(frozen=True)
class _SharedMemory:
    reducer: SharedMemoryReducer
    buffer_bytes: int


class DataGroup:
    """The connections of one process set. `ranks` are its global ranks, of which this process is one. `store` is a
    place of this process set alone. All methods are called from one thread."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), ranks.index(rank), len(ranks)
        self._store, self._timeout_s = store, timeout_s
        self._gathers = 0
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._raw: dict[str, RawGroup] = {}

    def describe(self, device: str, op: str) -> str:
        """The name of what combines tensors, for the timeline."""
        if device != "cpu":
            return "NCCL" if self.uses_nccl else "GLOO"
        return "SHARED_MEMORY" if op == "sum" and self._memory is not None else "GLOO"

    def sum_dtype(self, dtype: torch.dtype, device: str, op: str) -> torch.dtype:
        """The type in which tensors of this type are summed."""
        if device == "cpu" and op == "sum" and self._memory is not None:
            return dtype if dtype in TYPES else _WIDER.get(dtype, torch.float32)
        if device == "cpu" and op != "sum" and dtype in (torch.float16, torch.bfloat16):
            return torch.float32
        return _GLOO_WIDER.get(dtype, dtype)

    def buffer(self, dtype: torch.dtype, numel: int, device: torch.device) -> Tensor:
        """Returns a buffer for at most `numel` elements; a smaller one if shared memory has no room for more. Ranks get
        buffers of the same size. The contents are undefined."""
        limit = _LARGEST_BUFFER_BYTES
        if device.type == "cpu" and self._memory is not None:
            limit = self._memory.buffer_bytes
        numel = min(numel, max(1, limit // dtype.itemsize))
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        if dtype not in self._buffers or self._buffers[dtype].numel() < numel:
            self._buffers[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return self._buffers[dtype][:numel]

    def reduce(self, flat: Tensor, op: str) -> None:
        """Replaces a buffer by the sum, minimum, maximum or product over the ranks."""
        if self.size == 1 or flat.numel() == 0:
            return
        if flat.device.type == "cpu" and op == "sum" and self._memory is not None:
            self._memory.reducer.start(flat, 0)
            self._memory.reducer.finish()
        else:
            self._on_backend(flat, lambda tensor, group: group.all_reduce(tensor, op))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Replaces a contiguous tensor by that of the global rank `root`."""
        if self.size > 1 and tensor.numel():
            position = self.ranks.index(root)
            self._on_backend(tensor, lambda data, group: group.broadcast(data, position))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have the same shape."""
        if self.size == 1:
            return [tensor]
        staged, group = self._staged(tensor)
        outputs = [torch.empty_like(staged) for _ in self.ranks]
        if staged.numel():
            group.all_gather(outputs, staged)
        return [output.to(tensor.device) for output in outputs]

    def all_to_all(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends rows of a tensor of bytes in two dimensions, `sent[i]` of them to rank `i`. Returns the rows that came
        from all ranks."""
        if self.size == 1:
            return tensor
        staged, group = self._staged(tensor)
        output = staged.new_empty((sum(received), tensor.shape[1]))
        group.all_to_all(output, staged, received, sent)
        return output.to(tensor.device)

    def exchange(self, outgoing: Tensor, peer: int) -> Tensor:
        """Sends a tensor to a rank of this group, and returns the tensor that it has sent."""
        staged, group = self._staged(outgoing)
        incoming = torch.empty_like(staged)
        group.exchange(staged, incoming, peer)
        return incoming.to(outgoing.device)

    def close(self) -> None:
        if self.__dict__.get("_memory") is not None:
            assert self._memory is not None
            self._memory.reducer.close()
        for group in self._raw.values():
            group.abort()
        self._raw.clear()

    @cached_property
    def uses_nccl(self) -> bool:
        """Whether every rank has a GPU of its own, so that NCCL can connect them."""
        if not dist.is_nccl_available():
            return False
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return len(set(map(str, self._gather([this_process().machine, gpu])))) == self.size

    @cached_property
    def _memory(self) -> _SharedMemory | None:
        """Shared memory between the ranks; None if they are on several machines, or there is too little of it."""
        if self.size == 1:
            return None
        links = RankLinks(self.rank, self.ranks, self._timeout_s, self._gather)
        try:
            reducer = SharedMemoryReducer(links, operation="sum", what="fusion buffer")
        except InputError:  # all ranks raise it, or none does
            return None
        room = min(self._gather(storages.free_bytes())) // (4 * self.size)
        if room < 2**16:
            reducer.close()
            return None
        return _SharedMemory(reducer, min(_LARGEST_BUFFER_BYTES, room))

    def _backend(self, backend: str) -> RawGroup:
        if backend not in self._raw:
            store = dist.PrefixStore(backend, self._store)
            self._raw[backend] = RawGroup(backend, store, self.rank, self.size, self._timeout_s)
        return self._raw[backend]

    def _staged(self, tensor: Tensor) -> tuple[Tensor, RawGroup]:
        """Returns the tensor where a backend can send it, and this backend."""
        if tensor.device.type == "cuda" and self.uses_nccl:
            return tensor, self._backend("nccl")
        return tensor.cpu(), self._backend("gloo")

    def _on_backend(self, tensor: Tensor, collective: Callable[[Tensor, RawGroup], None]) -> None:
        staged, group = self._staged(tensor)
        collective(staged, group)
        if staged is not tensor and staged.device != tensor.device:
            tensor.copy_(staged)

    def _gather(self, value: Any) -> list[Any]:
        """Returns the plain values of all ranks."""
        self._gathers += 1
        key = f"gather {self._gathers} of rank"
        self._store.set(f"{key} {self.rank}", to_text(value))
        return [from_text(self._store.get(f"{key} {rank}")) for rank in range(self.size)]
