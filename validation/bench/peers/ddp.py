"""Plain PyTorch DistributedDataParallel.

Defaults: `DDP(model)`, as the tutorial has it. Best: the model is compiled, the optimizer fused, gradients are views of
the buckets, and the graph is declared static."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from validation.bench.peers.task import PeerTask, StepRecorder, run_peer, train_by_hand


def train(task: PeerTask, recorder: StepRecorder) -> None:
    dist.init_process_group(task.backend)
    model = task.model().to(task.device)
    if task.is_best:
        parallel_model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        parallel_model = torch.compile(parallel_model)  # type: ignore[assignment]
    else:
        parallel_model = DistributedDataParallel(model)
    train_by_hand(task, recorder, parallel_model, model, task.autocast)


if __name__ == "__main__":
    run_peer(train)
