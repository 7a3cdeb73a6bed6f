"""`Trainer`: runs a job's session from its newest checkpoint to its end: steps, evaluations, checkpoints, logs."""

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

from meshwright.checkpoint.load import newest_good
from meshwright.checkpoint.save import clear_unfinished, prune, save
from meshwright.data.evenness import labels_of, told_of_parts
from meshwright.data.loading import Batch
from meshwright.data.mapped import division_of
from meshwright.data.partition import ByPart, Partition
from meshwright.job import Job
from meshwright.launch.output import terminal
from meshwright.launch.place import Place
from meshwright.launch.signals import StopRequest
from meshwright.launch.world import World
from meshwright.train.agreement import StopAgreement
from meshwright.train.build import build_data, build_loading, build_metrics
from meshwright.train.output.folder import RunFolder, write_text
from meshwright.train.output.metrics_log import Logbook, finite
from meshwright.train.output.progress import Display, Silent, describe_metrics, display
from meshwright.train.output.recording import recording
from meshwright.train.output.throughput import Meter
from meshwright.train.stepping import Stepping

LOWER_IS_BETTER = ("loss", "error", "perplexity")


@dataclass(frozen=True)
class Best:
    step: int
    value: float


class Trainer:
    def __init__(
        self, job: Job, session: Stepping, world: World, folder: RunFolder, place: Place, record: int = 0
    ) -> None:
        """`record`: so many of the first steps are written down, for `prove --against`."""
        self.job = job
        self.session = session
        self.world = world
        self.folder = folder
        self.place = place
        self.train_set, self.eval_set = build_data(job)
        self.loading = build_loading(job, world.device)
        self.metrics = build_metrics(job)
        self.meter = Meter()
        self.last_loss: Tensor | None = None
        self.evaluated: tuple[int, dict[str, float]] | None = None  # the step, and what was measured
        self.saved_step: int | None = None
        self.best: Best | None = None
        self.warned = False
        self.record = record

    def run(self, stop: StopRequest) -> bool:
        """Trains to the end, or until a stop was asked for; says which."""
        resumed = self._resume()
        speaks = self.world.rank == 0
        log = self.job.log
        known = self._evaluated_now()
        self.logbook = Logbook(self.folder, self.session.steps, log.tensorboard, known) if speaks else None
        self.display: Display = display(terminal(), self.total_steps(), self.session.steps) if speaks else Silent()
        try:
            self.display.line(resumed)
            for line in self._told_of_parts():
                self.display.line(line)
            finished = self._train(stop)
            if finished:
                self._finish()
            else:
                self.display.line(f"stopped after step {self.session.steps}, which is saved")
            return finished
        finally:
            self.display.close()
            if self.logbook:
                self.logbook.close()

    def _told_of_parts(self) -> list[str]:
        """How even fixed parts of the data set are."""
        if not hasattr(self.train_set, "__len__"):
            return []
        division = self._division(len(self.train_set))
        return told_of_parts(division, labels_of(self.train_set)) if isinstance(division, ByPart) else []

    def total_steps(self) -> int | None:
        """How many steps the job takes; None for streams that do not know their length."""
        train = self.job.train
        if train.epochs is None or not hasattr(self.train_set, "__len__"):
            return train.steps
        per_epoch = self._division(len(self.train_set)).batches
        return min(train.epochs * per_epoch, train.steps or train.epochs * per_epoch)

    def _division(self, size: int) -> Partition:
        train, ranks = self.job.train, self.session.plan.data_ranks
        loading = replace(self.loading, parts=self.session.parts or self.loading.parts)
        return division_of(size, train.global_batch, ranks, loading, train.seed, self.job.data.drop_last)

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
        recorded = self.record if self.session.steps == 0 else 0  # a run that goes on has its first steps behind it
        with closing(batches), recording(self.session, self.folder.record, recorded) as step:  # type: ignore[type-var]
            self.place.at(self.session.steps, "data")
            for batch in batches:
                agreement.ask()
                self.last_loss = step(batch)
                self.place.finish_step()
                self.meter.step(batch.samples)
                self.display.advance(self.session.steps)
                self._log(batch)
                if self._evaluation_due(batch) and not self._evaluate(stop):
                    self._save()
                    return False
                if self._save_due():
                    self._save()
                if agreement.answer():
                    self._save()
                    return False
                if self._at_end():
                    break
                self.place.at(self.session.steps, "data")
        return True

    def _finish(self) -> None:
        """Measures and saves the end, and writes the result, which marks the run as finished."""
        if self.eval_set is not None and not self._evaluated_now():
            self._evaluate(None)
        self._save()
        self.place.at(self.session.steps, "result")
        peak = self._peak_memory_bytes()
        loss = None if self.last_loss is None else float(self.last_loss)
        if self.world.rank == 0:
            result = {
                "run": str(self.folder.path),
                "steps": self.session.steps,
                "loss": finite(loss),
                "metrics": {k: finite(v) for k, v in self.evaluated[1].items()} if self.evaluated else {},
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
        rate = self.meter.read()
        self.display.step(steps, loss, rate)
        if not math.isfinite(loss) and not self.warned:
            self.warned = True
            self.display.line(f"the loss is {loss} since step {steps} at the latest: lower the learning rate or clip")
        assert self.logbook is not None
        values = {"loss": loss, "lr": self.session.optimizer.param_groups[0]["lr"], "samples_per_s": rate}
        self.logbook.write("train", steps, batch.epoch, values)

    # ---- evaluation

    def _evaluation_due(self, batch: Batch | None) -> bool:
        """After every so many steps or every epoch, and at the end. `batch` is None where a run is taken up: the
        evaluation of the step it was saved at may have been cut short."""
        if self.eval_set is None or self._evaluated_now() or self.session.steps == 0:
            return False
        if self._at_end():
            return True
        every = self.job.log.eval_every_steps
        if every:
            return self.session.steps % every == 0
        return batch.last if batch else self.session.position[1] == 0

    def _evaluated_now(self) -> bool:
        return self.evaluated is not None and self.evaluated[0] == self.session.steps

    def _evaluate(self, stop: StopRequest | None) -> bool:
        """False where it was given up because a stop was asked for."""
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
        self.evaluated = (step, values)
        self.display.line(f"evaluation after step {step}: {describe_metrics(values)}")
        if self.logbook:
            epoch = self.session.position[0]
            self.logbook.write("eval", step, epoch, dict(values))
        name = self.job.checkpoint.best
        if name and self._is_better(values[name]):
            self.best = Best(step, values[name])
            self._save()
        return True

    def _is_better(self, value: float) -> bool:
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
        step = self.session.steps
        if self.saved_step == step:
            return
        self.meter.pause()
        self.place.at(step, "save")
        about = {
            **self.session.about(),
            "plan": self.session.plan.model_dump(),
            "loss": None if self.last_loss is None else float(self.last_loss),
            "evaluated": list(self.evaluated) if self.evaluated else None,
            "best": [self.best.step, self.best.value] if self.best else None,
        }
        path = save(self.session.state(), self.folder.checkpoints, step, about)
        self.saved_step = step
        if self.world.rank == 0:
            best = self.folder.checkpoints / "best"
            if self.best and self.best.step == step:
                _link(best, path.name)
            kept = best.readlink().name if best.is_symlink() else None
            prune(self.folder.checkpoints, self.job.checkpoint.keep, path.name, kept)

    def _resume(self) -> str:
        """Goes on from the newest good checkpoint; says from where, and which ones were damaged."""
        self.place.at(self.session.steps, "load checkpoint")
        choice: list[Any] = [None]
        if self.world.rank == 0:
            clear_unfinished(self.folder.checkpoints)
            found = newest_good(self.folder.checkpoints)
            choice = [(found.path, found.manifest.about if found.manifest else None, found.problems)]
        if self.world.size > 1:
            dist.broadcast_object_list(choice, src=0)
        path, about, problems = choice[0]
        damaged = "".join(f"damaged checkpoint left out: {problem}\n" for problem in problems)
        if path is None:
            return f"{damaged}training on {self._where()}"
        self.session.restore(path, about)
        self.saved_step = self.session.steps
        if about["loss"] is not None:
            self.last_loss = torch.tensor(about["loss"], dtype=torch.float64)
        if about["evaluated"]:
            self.evaluated = (int(about["evaluated"][0]), about["evaluated"][1])
        if about["best"]:
            self.best = Best(int(about["best"][0]), float(about["best"][1]))
        return f"{damaged}going on after step {self.session.steps} on {self._where()}"

    def _where(self) -> str:
        kind = "GPU" if self.world.device.type == "cuda" else "CPU rank"
        plural = "s" if self.world.size > 1 else ""
        return f"{self.world.size} {kind}{plural} ({self.session.plan.summary()}) in {self.folder.path}"

    def _peak_memory_bytes(self) -> int:
        """Of the rank that needed most: allocated on a GPU, resident on a CPU."""
        if self.world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.world.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.world.size == 1:
            return peak
        most = torch.tensor(peak)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)


def _link(link: Path, target: str) -> None:
    """Replaces a link in one go."""
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)
