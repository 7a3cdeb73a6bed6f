"""One rank of `meshwright train` for a LightningModule. The launcher calls `main` with the arguments RUN_FOLDER and
DEVICE in `sys.argv`."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything

from meshwright.checkpoint.agreement import from_first_rank
from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.save import clear_unfinished
from meshwright.compat.lightning.global_batches import GlobalBatchLoader
from meshwright.compat.lightning.run_outputs import RunCheckpoints, RunLogger, StopAndReport
from meshwright.compat.lightning.shares import batch_share
from meshwright.compat.lightning.trainer_strategy import MeshwrightStrategy
from meshwright.compat.lightning_job import MODULE_LOADERS
from meshwright.compat.loaders import check_full_batch
from meshwright.data.batch import SampleShare
from meshwright.data.prepared import PreparedShare
from meshwright.errors import InputError
from meshwright.files.storage import write_atomically
from meshwright.job import Job, load_job, load_plan
from meshwright.plan import Plan
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.rank import run_rank
from meshwright.processes.signals import StopRequest
from meshwright.processes.world import World
from meshwright.train.build import construct_model
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.metrics_log import MetricsLog, finite_or_none
from meshwright.user.call import build


class RunStrategy(MeshwrightStrategy):
    """Divides each batch of a loader among the ranks, so that a batch of the user's loader is a global batch."""

    def __init__(self, plan: Plan, seed: int, world: World) -> None:
        super().__init__(plan, checkpoint_format="meshwright", cluster_environment=RunEnvironment(world))
        self._seed = seed

    def process_dataloader(self, dataloader: Any) -> Any:
        assert self.lightning_module is not None
        is_training = self.lightning_module.trainer.training
        share = SampleShare(self.global_rank, self.world_size, 0, 1, self.plan.shares.samples if is_training else ())
        if is_training and share.samples and getattr(dataloader, "batch_size", None) is not None:
            check_full_batch(dataloader.batch_size, share.samples)
        note = self._shares.add_loader() if is_training else lambda _: None

        def note_share(share: PreparedShare | None) -> None:
            """Ranks may have different numbers of samples. At the end of a loop, batches may still be ahead."""
            if share is not None and share.global_samples:
                note(batch_share(share.samples, share.global_samples, self.world_size))

        counts = (self._epoch, note_share, lambda: note(None), self._batches_begun)
        return GlobalBatchLoader(dataloader, share, self._seed, *counts)

    def _epoch(self) -> int:
        assert self.lightning_module is not None
        return int(self.lightning_module.trainer.current_epoch)

    def _batches_begun(self) -> int:
        assert self.lightning_module is not None
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
        return 0 if progress.is_last_batch else int(progress.current.ready)


class RunEnvironment(ClusterEnvironment):
    """The ranks that Meshwright has started, and that are in a process group already."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided it."""

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided it."""

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return 0


def train_module(job: Job, plan: Plan, folder: RunFolder, world: World, heartbeat: Heartbeat) -> None:
    """Trains the job's LightningModule to its end, or until a stop is requested. Rank 0 writes the result."""
    _be_quiet()
    seed_everything(job.train.seed, verbose=False)
    module, data = construct_model(job), data_module(job)
    assert isinstance(module, LightningModule)
    _log_over_ranks(module)
    newest = from_first_rank(lambda: _find_newest(folder))
    with StopRequest() as stop:
        checkpoints = RunCheckpoints(folder.checkpoints, job.checkpoint.every_steps, job.checkpoint.keep)
        stopping = StopAndReport(world.size, lambda: stop.requested, heartbeat)
        trainer = _make_trainer(job, plan, folder, world, [stopping, checkpoints])
        trainer.fit(module, datamodule=data, ckpt_path=newest)
        checkpoints.save_now(trainer)
    if world.rank == 0 and not stopping.stopped:
        metrics = {name: finite_or_none(float(value)) for name, value in trainer.callback_metrics.items()}
        write_atomically(folder.result, json.dumps(_result(trainer, world, folder, metrics), indent=1))


def _make_trainer(job: Job, plan: Plan, folder: RunFolder, world: World, callbacks: list[Any]) -> Trainer:
    train, log = job.train, job.log

    def open_log() -> MetricsLog | None:
        return MetricsLog(folder, trainer.global_step, log.tensorboard) if world.rank == 0 else None

    logger = RunLogger(open_log)
    options: dict[str, Any] = {}
    if log.eval_every_steps is not None:
        options = {"val_check_interval": log.eval_every_steps, "check_val_every_n_epoch": None}
    trainer = Trainer(
        accelerator="gpu" if world.device.type == "cuda" else "cpu",
        devices=world.local_size,
        num_nodes=world.size // world.local_size,
        strategy=RunStrategy(plan, train.seed, world),
        max_epochs=-1 if train.epochs is None else train.epochs,
        max_steps=-1 if train.steps is None else train.steps,
        gradient_clip_val=train.clip_norm,
        deterministic=train.deterministic,
        log_every_n_steps=log.every_steps,
        logger=logger,
        callbacks=[*(build(call, role="callbacks") for call in job.callbacks), *callbacks],
        default_root_dir=folder.path,
        use_distributed_sampler=False,  # the strategy divides the batches
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    logger.is_evaluating = lambda: bool(trainer.validating)
    return trainer


def data_module(job: Job) -> LightningDataModule | None:
    """The job's data module; None if its LightningModule has the loaders."""
    if job.data.train.call == MODULE_LOADERS:
        return None
    data = build(job.data.train, role="data.train")
    if not isinstance(data, LightningDataModule):
        raise InputError(
            f"data.train makes a {type(data).__name__}, but the model is a LightningModule: give a LightningDataModule,"
            " or leave data out if the module has a train_dataloader"
        )
    return data


def _find_newest(folder: RunFolder) -> str | None:
    """The newest valid checkpoint of the run; None if there is none."""
    folder.checkpoints.mkdir(exist_ok=True)
    clear_unfinished(folder.checkpoints)
    newest = find_newest_valid(folder.checkpoints)
    for problem in newest.problems:
        print(problem, file=sys.stderr, flush=True)
    return None if newest.path is None else str(newest.path)


def _log_over_ranks(module: LightningModule) -> None:
    """Makes `self.log` log the mean over all ranks' samples, as one process would, unless it was asked for less."""
    original = module.log

    def log(*args: Any, **kwargs: Any) -> None:
        if not kwargs.get("rank_zero_only") and len(args) < 8:
            kwargs.setdefault("sync_dist", True)
        original(*args, **kwargs)

    module.log = log


def _result(trainer: Trainer, world: World, folder: RunFolder, metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": str(folder.path),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "samples_per_s": None,
        "measured_step_s": None,
        "predicted_step_s": None,
        "skipped_steps": 0,
        "restarts": world.attempt,
    }


def _be_quiet() -> None:
    """Leaves out Lightning's announcements; its warnings about how to use a Trainer do not apply to a run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")


def main() -> None:
    folder, device = RunFolder(Path(sys.argv[1])), sys.argv[2]
    job, plan = load_job(folder.job), load_plan(folder.plan)

    def train(world: World, heartbeat: Heartbeat) -> None:
        train_module(job, plan, folder, world, heartbeat)

    run_rank(train, device, job.train.timeout_s)


if __name__ == "__main__":
    main()
