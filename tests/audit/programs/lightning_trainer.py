"""Lightning's Trainer with its strategies ddp and fsdp: `torchrun --nproc-per-node 2 lightning_trainer.py`."""

import argparse
import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from tiny_gpt import ROWS, Block, TinyGPT, cross_entropy, text
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULTS = (
    *("none", "automatic_sampler", "same_rows", "world_size", "mean_over_ranks", "reduced_twice"),
    *("learning_rate", "accumulation"),
)


class CpuFSDPStrategy(FSDPStrategy):
    """Lightning refuses FSDPStrategy itself without a GPU."""


class Language(lightning.LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.model = TinyGPT()
        self.fault = fault

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDPStrategy) and not isinstance(self.model, FullyShardedDataParallel):
            self.model = FullyShardedDataParallel(
                self.model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        tokens = (y != -100).sum().float()
        if self.fault != "mean_over_ranks":
            tokens = self.trainer.strategy.reduce(tokens, reduce_op="mean")
        loss = cross_entropy(self.model(x), y, reduction="sum") / tokens
        if self.fault == "world_size":
            loss = loss * self.trainer.world_size
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.print(f"step {self.global_step} loss {mean.item():.6f}", flush=True)
        return loss

    def on_after_backward(self) -> None:
        if self.fault == "reduced_twice" and self.trainer.world_size > 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate = 1e-3 * self.trainer.world_size if self.fault == "learning_rate" else 1e-3
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=rate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    lightning.seed_everything(0)
    module = Language(args.fault)
    rows = ROWS // world // args.accumulate
    dataset = TensorDataset(*text(args.steps, masked=True))
    # Lightning's automatic sampler shuffles even where the loader does not.
    sampler = DistributedSampler(dataset, world, rank, shuffle=False)
    if args.fault in ("automatic_sampler", "same_rows"):
        sampler = None
    data = DataLoader(dataset, batch_size=rows, sampler=sampler)
    strategy = CpuFSDPStrategy() if args.strategy == "fsdp" else args.strategy
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy if world > 1 else "auto",
        max_steps=args.steps,
        accumulate_grad_batches=1 if args.fault == "accumulation" else args.accumulate,
        gradient_clip_val=0.3 if args.strategy == "ddp" else None,
        use_distributed_sampler=args.fault == "automatic_sampler",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)


if __name__ == "__main__":
    main()
