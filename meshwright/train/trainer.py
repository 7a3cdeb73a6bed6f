"""`Trainer`: runs a job on one rank, from its newest checkpoint to its end: steps, evaluations, checkpoints and logs.
Every rank of a run has one.

If a rank dies while a checkpoint is saved, the run repeats the steps since the previous checkpoint:

- checkpoint/save.py writes a checkpoint under a temporary name and renames it when it is complete, so a half-written
  checkpoint is never read (the docstring of save.py lists every case);
- launch/local stops the other ranks and starts all of them again;
- `_resume` below removes the half-written checkpoint (`clear_unfinished`) and continues from the newest valid one.
"""

import json
import math
import resource
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.save import clear_unfinished, prune, save
from meshwright.data.loading import Batch
from meshwright.data.mapped import make_partition
from meshwright.data.part_balance import describe_parts, labels_of
from meshwright.data.partition import Partition, PartPartition
from meshwright.job import Job
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.output import terminal
from meshwright.launch.signals import StopRequest
from meshwright.launch.world import World
from meshwright.train.build import build_data, build_loading, build_metrics
from meshwright.train.output.folder import RunFolder, write_text
from meshwright.train.output.metrics_log import MetricsLog, finite_or_none
from meshwright.train.output.progress import Display, SilentDisplay, describe_metrics, make_display
from meshwright.train.output.recording import record_steps
from meshwright.train.output.throughput import ThroughputMeter
from meshwright.train.step_runner import StepRunner
from meshwright.train.stop_agreement import StopAgreement

LOWER_IS_BETTER = ("loss", "error", "perplexity")


@dataclass(frozen=True)
class BestCheckpoint:
    """The step at which the metric that `checkpoint.best` names was best so far, and its value there."""

    step: int
    value: float


class Trainer:
    """The training loop of one rank. Only rank 0 prints, logs and writes the result; all ranks save checkpoints
    together."""

    def __init__(
        self,
        job: Job,
        session: StepRunner,
        world: World,
        folder: RunFolder,
        heartbeat: Heartbeat,
        recorded_steps: int = 0,
    ) -> None:
        """`recorded_steps` is the number of steps, from the first one on, to record for `prove --against`."""
        self.job = job
        self.session = session
        self.world = world
        self.folder = folder
        self.heartbeat = heartbeat
        self.train_set, self.eval_set = build_data(job)
        self.loading = build_loading(job, world.device)
        self.metrics = build_metrics(job)
        self.meter = ThroughputMeter()
        self.last_loss: Tensor | None = None
        self.last_evaluation: tuple[int, dict[str, float]] | None = None  # the step and the metrics
        self.saved_step: int | None = None
        self.best: BestCheckpoint | None = None
        self.warned_of_loss = False
        self.recorded_steps = recorded_steps

    def run(self, stop: StopRequest) -> bool:
        """Trains to the end, or until a stop is requested. Returns True if the run is finished, and False if it was
        stopped."""
        start_message = self._resume()
        self._open_outputs()
        try:
            self.display.line(start_message)
            for line in self._describe_data_parts():
                self.display.line(line)
            finished = self._train(stop)
            if finished:
                self._finish()
            else:
                self.display.line(f"stopped after step {self.session.steps}, which is saved")
            return finished
        finally:
            self.display.close()
            if self.metrics_log:
                self.metrics_log.close()

    def _open_outputs(self) -> None:
        """Opens the metrics log and the progress display on rank 0."""
        self.metrics_log: MetricsLog | None = None
        self.display: Display = SilentDisplay()
        if self.world.rank == 0:
            steps, tensorboard = self.session.steps, self.job.log.tensorboard
            self.metrics_log = MetricsLog(self.folder, steps, tensorboard, self._is_evaluated())
            self.display = make_display(terminal(), self.total_steps(), steps)

    def _describe_data_parts(self) -> list[str]:
        """Lines that say how evenly the samples are distributed over the fixed parts of the data set. Empty unless
        `data.partition` is `sample`."""
        if not hasattr(self.train_set, "__len__"):
            return []
        partition = self._partition(len(self.train_set))
        return describe_parts(partition, labels_of(self.train_set)) if isinstance(partition, PartPartition) else []

    def total_steps(self) -> int | None:
        """The number of steps of the whole job. None if it is unknown, because the job counts epochs of a stream."""
        train = self.job.train
        if train.epochs is None or not hasattr(self.train_set, "__len__"):
            return train.steps
        per_epoch = self._partition(len(self.train_set)).batches
        return min(train.epochs * per_epoch, train.steps or train.epochs * per_epoch)

    def _partition(self, size: int) -> Partition:
        """How a data set of this size is divided into batches and among ranks."""
        train, ranks = self.job.train, self.session.plan.data_ranks
        loading = replace(self.loading, parts=self.session.parts or self.loading.parts)
        return make_partition(size, train.global_batch, ranks, loading, train.seed, self.job.data.drop_last)

    # ---- the loop

    def _train(self, stop: StopRequest) -> bool:
        agreement = StopAgreement(self.world.size, lambda: stop.requested)
        if self._evaluation_due(None) and not self._evaluate(stop):
            self._save()
            return False
        if self._at_end():
            return True
        train = self.job.train
        batches = self.session.batches(
            self.train_set, train.epochs, train.global_batch, self.loading, self.job.data.drop_last
        )
        recorded = self.recorded_steps if self.session.steps == 0 else 0  # the first steps of a resumed run are over
        with closing(batches), record_steps(self.session, self.folder.record, recorded) as step:  # type: ignore[type-var]
            self.heartbeat.update(self.session.steps, "data")
            for batch in batches:
                agreement.start()
                self.last_loss = step(batch)
                self.heartbeat.finish_step()
                self.meter.step(batch.samples)
                self.display.advance(self.session.steps)
                self._log(batch)
                if self._evaluation_due(batch) and not self._evaluate(stop):
                    self._save()
                    return False
                if self._save_due():
                    self._save()
                if agreement.result():
                    self._save()
                    return False
                if self._at_end():
                    break
                self.heartbeat.update(self.session.steps, "data")
        return True

    def _finish(self) -> None:
        """Evaluates and saves the final weights, and writes the result, which marks the run as finished."""
        if self.eval_set is not None and not self._is_evaluated():
            self._evaluate(None)
        self._save()
        self.heartbeat.update(self.session.steps, "result")
        peak = self._peak_memory_bytes()
        loss = None if self.last_loss is None else float(self.last_loss)
        metrics = self.last_evaluation[1] if self.last_evaluation else {}
        if self.world.rank == 0:
            result = {
                "run": str(self.folder.path),
                "steps": self.session.steps,
                "loss": finite_or_none(loss),
                "metrics": {name: finite_or_none(value) for name, value in metrics.items()},
                "samples_per_s": self.meter.samples_per_s,
                "restarts": self.world.attempt,
                "predicted_step_s": None,
                "measured_step_s": self.meter.step_s,
                "peak_memory_bytes": peak,
            }
            write_text(self.folder.result, json.dumps(result, indent=1))

    def _at_end(self) -> bool:
        train = self.job.train
        if train.steps is not None and self.session.steps >= train.steps:
            return True
        return train.epochs is not None and self.session.position[0] >= train.epochs

    # ---- logs

    def _log(self, batch: Batch) -> None:
        steps = self.session.steps
        if self.world.rank != 0 or self.last_loss is None:
            return
        if steps % self.job.log.every_steps and not self._at_end():
            return
        loss = float(self.last_loss)
        rate = self.meter.end_window()
        self.display.step(steps, loss, rate)
        if not math.isfinite(loss) and not self.warned_of_loss:
            self.warned_of_loss = True
            self.display.line(f"the loss is {loss} since step {steps} at the latest: lower the learning rate or clip")
        assert self.metrics_log is not None
        values = {"loss": loss, "lr": self.session.optimizer.param_groups[0]["lr"], "samples_per_s": rate}
        self.metrics_log.write("train", steps, batch.epoch, values)

    # ---- evaluation

    def _evaluation_due(self, batch: Batch | None) -> bool:
        """Whether to evaluate now: after every `eval_every_steps` steps or every epoch, and at the end. `batch` is the
        batch of the step just made. It is None before the loop: a resumed run evaluates there if its last step should
        have been evaluated but the evaluation was interrupted."""
        if self.eval_set is None or self._is_evaluated() or self.session.steps == 0:
            return False
        if self._at_end():
            return True
        every = self.job.log.eval_every_steps
        if every:
            return self.session.steps % every == 0
        return batch.last if batch else self.session.position[1] == 0

    def _is_evaluated(self) -> bool:
        """Whether the current step has been evaluated."""
        return self.last_evaluation is not None and self.last_evaluation[0] == self.session.steps

    def _evaluate(self, stop: StopRequest | None) -> bool:
        """Evaluates, logs the metrics, and saves a checkpoint if it is the best so far. Returns False if `stop`
        interrupted the evaluation; None for `stop` means that nothing can interrupt it."""
        self.meter.pause()
        values = self.session.evaluate(
            self.eval_set,
            self.metrics,
            self.job.train.global_batch,
            self.loading,
            (lambda: stop.requested) if stop else (lambda: False),
        )
        if values is None:
            return False
        step = self.session.steps
        self.last_evaluation = (step, values)
        self.display.line(f"evaluation after step {step}: {describe_metrics(values)}")
        if self.metrics_log:
            epoch = self.session.position[0]
            self.metrics_log.write("eval", step, epoch, dict(values))
        name = self.job.checkpoint.best
        if name and self._is_better(values[name]):
            self.best = BestCheckpoint(step, values[name])
            self._save()
        return True

    def _is_better(self, value: float) -> bool:
        """Whether `value` of the metric that `checkpoint.best` names is better than its value at the best
        checkpoint."""
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        name, better = self.job.checkpoint.best or "", self.job.checkpoint.better
        lower = better == "lower" if better else any(word in name.lower() for word in LOWER_IS_BETTER)
        return value < self.best.value if lower else value > self.best.value

    # ---- checkpoints

    def _save_due(self) -> bool:
        every = self.job.checkpoint.every_steps
        return every is not None and self.session.steps % every == 0

    def _save(self) -> None:
        """Saves a checkpoint of the current step unless this step is saved already, and deletes old checkpoints. All
        ranks call this together."""
        step = self.session.steps
        if self.saved_step == step:
            return
        self.meter.pause()
        self.heartbeat.update(step, "save")
        about = {
            **self.session.about(),
            "plan": self.session.plan.model_dump(),
            "loss": None if self.last_loss is None else float(self.last_loss),
            "evaluated": list(self.last_evaluation) if self.last_evaluation else None,
            "best": [self.best.step, self.best.value] if self.best else None,
        }
        path = save(self.session.state(), self.folder.checkpoints, step, about)
        self.saved_step = step
        if self.world.rank == 0:
            best_link = self.folder.checkpoints / "best"
            if self.best and self.best.step == step:
                _replace_link(best_link, path.name)
            best_name = best_link.readlink().name if best_link.is_symlink() else None
            prune(self.folder.checkpoints, self.job.checkpoint.keep, path.name, best_name)

    def _resume(self) -> str:
        """Resumes from the newest valid checkpoint, if there is one. Returns a message that says where the run starts
        and which checkpoints are damaged."""
        self.heartbeat.update(self.session.steps, "load checkpoint")
        choice: list[Any] = [None]
        if self.world.rank == 0:
            clear_unfinished(self.folder.checkpoints)
            newest = find_newest_valid(self.folder.checkpoints)
            choice = [(newest.path, newest.manifest.about if newest.manifest else None, newest.problems)]
        if self.world.size > 1:
            dist.broadcast_object_list(choice, src=0)
        path, about, problems = choice[0]
        damaged = "".join(f"damaged checkpoint left out: {problem}\n" for problem in problems)
        if path is None:
            return f"{damaged}training on {self._describe_ranks()}"
        self.session.restore(path, about)
        self.saved_step = self.session.steps
        if about["loss"] is not None:
            self.last_loss = torch.tensor(about["loss"], dtype=torch.float64)
        if about["evaluated"]:
            self.last_evaluation = (int(about["evaluated"][0]), about["evaluated"][1])
        if about["best"]:
            self.best = BestCheckpoint(int(about["best"][0]), float(about["best"][1]))
        return f"{damaged}resuming after step {self.session.steps} on {self._describe_ranks()}"

    def _describe_ranks(self) -> str:
        kind = "GPU" if self.world.device.type == "cuda" else "CPU rank"
        plural = "s" if self.world.size > 1 else ""
        return f"{self.world.size} {kind}{plural} ({self.session.plan.summary()}) in {self.folder.path}"

    def _peak_memory_bytes(self) -> int:
        """The largest peak memory of all ranks: allocated on a GPU, resident on a CPU."""
        if self.world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.world.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.world.size == 1:
            return peak
        largest = torch.tensor(peak)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


def _replace_link(link: Path, target: str) -> None:
    """Points a symbolic link to another target atomically."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
