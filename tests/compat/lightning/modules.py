"""A regression and a GAN as LightningModules in fp64, with their data: 72 samples, 6 batches of 12
in each of 5 epochs, so 30 steps."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwright as mw

GLOBAL_BATCH, EPOCHS = 12, 5


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(72, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin() + 0.1 * inputs[:, :1])


class Samples(LightningDataModule):
    """The batches in the order of the data set. If `ranks` is not None, they are those of one of so many ranks:
    Lightning would shuffle the samples of a loader without a DistributedSampler."""

    def __init__(self, ranks: int | None = None, rank: int = 0, batch: int = GLOBAL_BATCH) -> None:
        super().__init__()
        self.batch = batch
        self.ranks = ranks
        self.rank = rank

    def train_dataloader(self) -> "DataLoader[Any]":
        if self.ranks is None:
            return DataLoader(samples(), batch_size=self.batch)
        sampler: Any = DistributedSampler(samples(), self.ranks, self.rank, shuffle=False)
        return DataLoader(samples(), batch_size=GLOBAL_BATCH // self.ranks, sampler=sampler)

    def val_dataloader(self) -> "DataLoader[Any]":
        return self.train_dataloader()


def network(width: int, outputs: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, outputs)
    ).double()


class Regression(LightningModule):
    """Has a schedule for steps and one for epochs, validates, and logs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = network(6)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.scale * self.network(inputs)
        return output

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        per_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        per_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": per_step, "interval": "step"}, {"scheduler": per_epoch, "interval": "epoch"}]


class Gan(LightningModule):
    """Trains two networks in turns, by manual optimization. With `toggles`, each is frozen while the other is
    trained."""

    automatic_optimization = False

    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.toggles = toggles
        self.generator = network(6, 6)
        self.discriminator = network(6)

    def training_step(self, batch: Any, index: int) -> None:
        noise, _ = batch
        real = noise.roll(1, dims=1) * 2
        optimizers: Any = self.optimizers()
        self._train(optimizers[0], lambda: F.softplus(-self.discriminator(self.generator(noise))).mean())
        self._train(
            optimizers[1],
            lambda: (
                F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(self.generator(noise).detach()))
            ).mean(),
        )
        if self.trainer.is_last_batch:
            schedule: Any = self.lr_schedulers()
            schedule.step()

    def _train(self, optimizer: Any, loss_of: Any) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        of_discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9)
        return [of_generator, of_discriminator], [torch.optim.lr_scheduler.StepLR(of_generator, 2, 0.5)]


class CountSteps(Callback):
    """A callback that only reads."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if "validation_loss" in trainer.callback_metrics:
            self.validations.append(float(trainer.callback_metrics["validation_loss"]))


def plain(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor], names: Iterable[str] = ()) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in (names or one))


class FailOnce(Callback):
    """Fails on all ranks in the middle of an epoch, in the first attempt only."""

    def __init__(self, file: str, batch: int = 9) -> None:
        self._file = Path(file)
        self._batch = batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx >= self._batch and not self._file.exists():
            trainer.strategy.barrier()
            self._file.touch()
            raise RuntimeError(f"batch {self._batch}")


class DieOnce(Callback):
    """Kills the last rank in the middle of an epoch, in the first attempt only."""

    def __init__(self, file: str, batch: int = 9) -> None:
        self._file = Path(file)
        self._batch = batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        batches = trainer.fit_loop.epoch_loop.total_batch_idx
        if batches >= self._batch and trainer.global_rank == trainer.world_size - 1 and not self._file.exists():
            self._file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class WithSession(LightningModule):
    """Trains its network through a session, so that plans may split or cut it."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def session(self, plan: Any) -> mw.Session:
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.02)
        inputs, targets = samples().tensors
        batch = (inputs[:4], targets[:4])
        return mw.parallelize(self.network, optimizer, loss=F.mse_loss, plan=plan, sample_batch=batch, device="cpu")

    def training_step(self, batch: Any, index: int) -> None:
        strategy: Any = self.trainer.strategy
        self.log("loss", strategy.session.step(batch))

    def configure_optimizers(self) -> None:
        return None
