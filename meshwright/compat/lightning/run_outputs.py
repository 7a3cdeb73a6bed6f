"""What a run of `meshwright train` adds to Lightning's Trainer: its log of metrics, its checkpoints, and its reaction
to a stop signal."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.processes.heartbeat import Heartbeat
from meshwright.train.output.metrics_log import MetricsLog
from meshwright.train.stop_agreement import StopAgreement


class RunLogger(Logger):
    """Writes what `self.log` logs to metrics.jsonl and to TensorBoard. `open_log` returns the log on rank 0, and None
    on other ranks; it is called when the first metrics are there, after the checkpoint was loaded."""

    def __init__(self, open_log: Callable[[], MetricsLog | None]) -> None:
        super().__init__()
        self._open_log = open_log
        self._log: MetricsLog | None = None
        self._is_open = False
        self.is_evaluating: Callable[[], bool] = lambda: False

    @property
    def name(self) -> str:
        return "meshwright"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: job.yaml has them."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self._is_open:
            self._log, self._is_open = self._open_log(), True
        if self._log is not None:
            values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
            kind = "eval" if self.is_evaluating() else "train"
            self._log.write(kind, int(step or 0), int(metrics.get("epoch", 0)), values)

    def finalize(self, status: str) -> None:
        if self._log is not None:
            self._log.close()
        self._log, self._is_open = None, False


class RunCheckpoints(ModelCheckpoint):
    """Saves checkpoints under the names that runs have, every `every_steps` batches and at the end of the training. The
    newest `keep` stay."""

    FILE_EXTENSION = ""

    def __init__(self, folder: Path, every_steps: int | None, keep: int) -> None:
        super().__init__(
            dirpath=folder,
            filename="step-{step:08d}",
            auto_insert_metric_name=False,
            monitor="step",
            mode="max",
            save_top_k=keep,
            every_n_train_steps=every_steps,
            every_n_epochs=None if every_steps else 1,
            enable_version_counter=False,
        )
        assert checkpoint_name(7) == "step-00000007"

    def save_now(self, trainer: Any) -> None:
        """Saves a checkpoint, unless there is one of this step."""
        if self._last_global_step_saved != trainer.global_step:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


class StopAndReport(Callback):
    """Ends the training after the step in which a rank was told to stop, and writes heartbeats. `stopped` says whether
    that happened."""

    def __init__(self, ranks: int, is_requested: Callable[[], bool], heartbeat: Heartbeat) -> None:
        self._agreement = StopAgreement(ranks, is_requested)
        self._heartbeat = heartbeat
        self.stopped = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._heartbeat.update(trainer.global_step, "training_step")
        self._agreement.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._heartbeat.finish_step()
        if self._agreement.result():
            self.stopped = trainer.should_stop = True
