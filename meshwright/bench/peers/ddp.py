"""Plain PyTorch DistributedDataParallel.

Defaults: `DDP(model)`, as the tutorial has it. Best: the model is compiled, the optimizer fused, gradients are views of
the buckets, and the graph is declared static."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.bench.peers.task import PeerTask, StepRecorder, run_peer


def train(task: PeerTask, recorder: StepRecorder) -> None:
    dist.init_process_group(task.backend)
    model = task.model().to(task.device)
    optimizer = task.optimizer(model)
    if task.is_best:
        parallel_model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        parallel_model = torch.compile(parallel_model)  # type: ignore[assignment]
    else:
        parallel_model = DistributedDataParallel(model)
    for batch in task.distributed_loader():
        with task.autocast():
            loss = task.loss(parallel_model, task.on_device(batch))
        optimizer.zero_grad()
        loss.backward()
        if task.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        recorder.step(loss)


if __name__ == "__main__":
    run_peer(train)
