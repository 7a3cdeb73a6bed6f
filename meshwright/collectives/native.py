"""`NativeReducer`: averages gradients with the all-reduce of the backend (Gloo, NCCL), as DDP does by default."""

from collections import deque

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CollectiveError


class NativeReducer:
    """A `Reducer` for any backend. Each rank divides its tensor by the number of ranks, then the tensors are added."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: deque[tuple[dist.Work, int]] = deque()

    @property
    def awaited(self) -> int | None:
        return next((bucket for _, bucket in self._pending), None)

    def start(self, flat: Tensor, bucket: int) -> None:
        flat.div_(self._group.size())
        try:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._failure(bucket, error) from error
        if work is not None:
            self._pending.append((work, bucket))

    def finish(self) -> None:
        while self._pending:
            work, bucket = self._pending[0]
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(bucket, error) from error
            self._pending.popleft()

    def close(self) -> None:
        self._pending.clear()

    def _failure(self, bucket: int, error: RuntimeError) -> CollectiveError:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
        backend = dist.get_backend(self._group)
        reason = str(error).strip().splitlines()[0]
        return CollectiveError(f"{backend} all-reduce of bucket {bucket} among ranks {ranks}: {reason}")
