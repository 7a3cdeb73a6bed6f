"""Lets DDP average its gradients with one of the reducers, for tests that compare it with DDP alone."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.reducer import Reducer


class BucketAverager:
    """The state of a communication hook. Each bucket is started when DDP has filled it, and all buckets are finished
    with the last one."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.pending: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.pending.append((future, bucket.buffer()))
        self.reducer.start(bucket.buffer(), bucket.index())
        if bucket.is_last():
            self.reducer.finish()
            for pending, flat in self.pending:
                pending.set_result(flat)
            self.pending.clear()
        return future


def average_with(model: DistributedDataParallel, reducer: Reducer) -> None:
    """Makes the model average its gradients with the reducer."""
    model.register_comm_hook(BucketAverager(reducer), _average_bucket)


def _average_bucket(averager: BucketAverager, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return averager.start(bucket)
