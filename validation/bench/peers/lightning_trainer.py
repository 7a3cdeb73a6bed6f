"""Lightning's Trainer.

Defaults: `Trainer(strategy="ddp")` with its progress bar, logger and checkpoints, which go to a temporary folder. Best:
`barebones=True`, which switches these off, a compiled model, DDP's options for speed, and a fused optimizer."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from validation.bench.peers.task import PeerTask, StepRecorder, run_peer


class _Module(LightningModule):
    def __init__(self, task: PeerTask) -> None:
        super().__init__()
        self._task = task
        self.model = task.model()

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self._task.loss(self.model, batch)

    def configure_optimizers(self) -> Optimizer:
        return self._task.optimizer(self.model)


class _RecordSteps(Callback):
    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        self._recorder.step(outputs["loss"])


def train(task: PeerTask, recorder: StepRecorder) -> None:
    dist.init_process_group(task.backend)
    ranks = dist.get_world_size()
    module: Any = _Module(task)
    options: dict[str, Any] = {"strategy": "ddp"}
    if task.is_best:
        module = torch.compile(module)
        options = {"strategy": DDPStrategy(gradient_as_bucket_view=True, static_graph=True), "barebones": True}
    with tempfile.TemporaryDirectory(prefix="meshwright-peers-") as folder:
        trainer = Trainer(
            accelerator=task.device_kind,
            devices=ranks,
            max_steps=task.total_steps,
            precision="bf16-mixed" if task.precision == "bf16" else "32-true",
            gradient_clip_val=task.clip_norm,
            callbacks=[_RecordSteps(recorder)],
            default_root_dir=folder,
            use_distributed_sampler=False,  # Lightning's own would shuffle the samples
            **options,
        )
        trainer.fit(module, task.distributed_loader())


if __name__ == "__main__":
    run_peer(train)
