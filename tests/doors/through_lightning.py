"""Lightning's `Trainer` with `MeshwrightStrategy`. Lightning starts the ranks: the first is the script itself."""

from typing import Any

from meshwright.user.torchvision_import import mend_torchvision

mend_torchvision()

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from meshwright.compat.lightning import MeshwrightStrategy  # noqa: E402
from tests.doors.training import EPOCHS, GLOBAL_BATCH, REPLICATE, Progress, adam, folder_of_run, network, samples  # noqa: E402


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return adam(self)


class Report(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.progress = Progress(folder_of_run(), trainer.global_rank)
        self.progress.began(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.progress.step(trainer.global_step)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.progress.ended(strategy.full_state_dict())


class Checkpoint(ModelCheckpoint):
    """Lightning's own, at the end of each epoch."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        super().on_train_epoch_end(trainer, module)
        report = next(callback for callback in trainer.callbacks if isinstance(callback, Report))
        report.progress.saved(trainer.global_step)


def main() -> None:
    folder = folder_of_run() / "checkpoints"
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MeshwrightStrategy(plan=REPLICATE, checkpoint_format="meshwright"),
        max_epochs=EPOCHS,
        callbacks=[Report(), Checkpoint(dirpath=folder, save_last=True, save_on_train_epoch_end=True)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(samples(), batch_size=GLOBAL_BATCH // 2)
    trainer.fit(Module(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
