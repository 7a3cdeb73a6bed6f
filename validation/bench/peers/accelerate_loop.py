"""Hugging Face Accelerate.

Defaults: `Accelerator()` and `prepare`. Best: compiled through Accelerate's own plugin, with DDP's options for speed
through its keyword handler, and a fused optimizer."""

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin

from validation.bench.peers.task import PeerTask, StepRecorder, run_peer


def train(task: PeerTask, recorder: StepRecorder) -> None:
    options: dict[str, Any] = {}
    if task.is_best:
        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
        options = {"kwargs_handlers": [handler], "dynamo_plugin": TorchDynamoPlugin(backend="inductor")}
    accelerator = Accelerator(
        mixed_precision="bf16" if task.precision == "bf16" else "no", cpu=task.device_kind == "cpu", **options
    )
    model = task.model()
    prepared = accelerator.prepare(model, task.optimizer(model), task.loader(dist.get_world_size()))
    parallel_model, optimizer, loader = prepared
    for batch in loader:
        with accelerator.autocast():
            loss = task.loss(parallel_model, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        if task.clip_norm:
            accelerator.clip_grad_norm_(parallel_model.parameters(), task.clip_norm)
        optimizer.step()
        recorder.step(loss)


if __name__ == "__main__":
    run_peer(train)
