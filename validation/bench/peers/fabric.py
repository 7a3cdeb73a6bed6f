"""Lightning Fabric.

Defaults: `Fabric(strategy="ddp")`. Best: the model is compiled before `setup`, with DDP's options for speed, and a
fused optimizer."""

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from validation.bench.peers.task import PeerTask, StepRecorder, run_peer


def train(task: PeerTask, recorder: StepRecorder) -> None:
    dist.init_process_group(task.backend)
    ranks = dist.get_world_size()
    strategy = DDPStrategy(gradient_as_bucket_view=True, static_graph=True) if task.is_best else "ddp"
    fabric = Fabric(
        accelerator=task.device_kind,
        devices=ranks,
        strategy=strategy,
        precision="bf16-mixed" if task.precision == "bf16" else "32-true",
    )
    fabric.launch()
    model = task.model()
    optimizer = task.optimizer(model)
    if task.is_best:
        model = torch.compile(model)  # type: ignore[assignment]
    parallel_model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(task.loader(ranks))
    for batch in loader:
        loss = task.loss(parallel_model, batch)
        optimizer.zero_grad()
        fabric.backward(loss)
        if task.clip_norm:
            fabric.clip_gradients(parallel_model, optimizer, max_norm=task.clip_norm)
        optimizer.step()
        recorder.step(loss)


if __name__ == "__main__":
    run_peer(train)
