"""`Trainer`: runs a job on one rank, from its newest checkpoint to its end: steps, evaluations, checkpoints and logs.

If a rank dies while a checkpoint is saved, processes/local starts all ranks again, and `_resume` continues from the
newest valid checkpoint. The docstring of checkpoint/save.py lists every case.
"""

import json
import time
from contextlib import closing, suppress
from typing import Any

import torch
from torch import Tensor

from meshwright.data.loading import Batch
from meshwright.errors import TrainingDiverged
from meshwright.files.storage import write_atomically
from meshwright.job import Job
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.output import terminal
from meshwright.processes.signals import StopRequest
from meshwright.processes.world import World
from meshwright.train.build import build_data, build_loading, build_metrics
from meshwright.train.callbacks.callbacks import Callbacks, build_callbacks
from meshwright.train.callbacks.run import CallbackRun
from meshwright.train.metrics import evaluated_value
from meshwright.train.output.checkpoints import BestCheckpoint, NotFiniteError, RunCheckpoints, SavedCheckpoint
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.metrics_log import MetricsLog, finite_or_none
from meshwright.train.output.peak_memory import largest_peak_memory_bytes
from meshwright.train.output.progress import Display, SilentDisplay, describe_metrics, make_display
from meshwright.train.output.recording import record_steps
from meshwright.train.output.recovery import recovery_figures
from meshwright.train.output.throughput import ThroughputMeter, describe_wait
from meshwright.train.output.times.expert_tokens import expert_metrics, expert_result
from meshwright.train.output.times.share_changes import ShareChanges
from meshwright.train.output.times.stragglers import StragglerWatch
from meshwright.train.step.divergence import DivergenceMonitor
from meshwright.train.step.job_length import JobLength
from meshwright.train.step.schedule import step_after_evaluation
from meshwright.train.step_runner import StepRunner
from meshwright.train.stop_agreement import StopAgreement
from meshwright.train.tuning.fallbacks import FallbackRecord


class Trainer:
    """The training loop of one rank. Only rank 0 prints, logs and writes the result; all ranks save together."""

    def __init__(
        self,
        job: Job,
        session: StepRunner,  # a Session, or the Server of a rank with parameter servers
        world: World,
        folder: RunFolder,
        heartbeat: Heartbeat,
        recorded_steps: int = 0,
        predicted_step_s: float | None = None,
    ) -> None:
        """`recorded_steps` is the number of steps, from the first one on, to record for `prove --against`.
        `predicted_step_s` is only copied into the result; None if there is no prediction."""
        self.job, self.session, self.world = job, session, world
        self.folder, self.heartbeat = folder, heartbeat
        self.train_set, self.eval_set = build_data(job)
        self.loading = build_loading(job, world.device)
        self.metrics = build_metrics(job)
        self.length = JobLength(job, session, self.train_set, self.loading)
        self.meter = ThroughputMeter()
        self.last_loss: Tensor | None = None
        self.last_evaluation: tuple[int, dict[str, float]] | None = None  # the step and the metrics
        self.checkpoints = RunCheckpoints(folder, world, job.checkpoint, lambda line: self.display.line(line))
        self.saved_step: int | None = None
        self.best: BestCheckpoint | None = None
        self.recorded_steps, self.predicted_step_s = recorded_steps, predicted_step_s
        self.divergence = DivergenceMonitor(job.train.on_nonfinite, job.train.on_spike)
        self.left_out: set[tuple[int, int]] = set()  # the epoch and index of batches that are not trained on
        self.callbacks = Callbacks(build_callbacks(job), CallbackRun(job, session, world, folder), self._report)
        self.stragglers = StragglerWatch(folder.times, world.size, lambda line: self.display.line(line))
        self.shares = ShareChanges(folder.shares, session, world.rank, lambda line: self.display.line(line))
        self.fallbacks = FallbackRecord(folder, job, session)
        self.told_not_saved = False  # whether the user knows that the weights are not finite

    def run(self, stop: StopRequest) -> bool:
        """Trains to the end, or until a stop is requested. Returns True if the run is finished, and False if it was
        stopped."""
        self.checkpoints.note_start(self.session.state(), self.session.module)
        start_message = self._resume()
        self._open_outputs()
        try:
            self.display.line(start_message)
            for line in self.length.describe_data_parts():
                self.display.line(line)
            finished = self._train(stop)
            self.checkpoints.finish()
            if finished and self.callbacks.stopped is not None:
                self.display.line(f"a callback ends the run after step {self.session.steps}: {self.callbacks.stopped}")
            result = self._finish() if finished else None
            if not finished:
                self.display.line(f"stopped after step {self.session.steps}, {self._describe_saved()}")
            self.callbacks.end(result)
            self.checkpoints.finish_copies(None if finished else self.job.train.grace_s / 2)
            return finished
        finally:
            with suppress(Exception):  # a checkpoint that was copied before the run failed is published
                self.checkpoints.finish(self.job.train.grace_s)
            self.display.close()
            if self.metrics_log:
                self.metrics_log.close()

    def _report(self, activity: str) -> None:
        """Writes to the heartbeat what this rank is doing."""
        self.heartbeat.update(self.session.steps, activity)

    def _open_outputs(self) -> None:
        """Opens the metrics log and the progress display on rank 0."""
        self.metrics_log = self._open_metrics_log()
        self.display: Display = SilentDisplay()
        if self.world.rank == 0:
            self.display = make_display(terminal(), self.length.total_steps(), self.session.steps)

    def _open_metrics_log(self) -> MetricsLog | None:
        """Opens the metrics log at the current step; None on ranks other than 0."""
        if self.world.rank != 0:
            return None
        return MetricsLog(self.folder, self.session.steps, self.job.log.tensorboard, self._is_evaluated())

    # ---- the loop

    def _train(self, stop: StopRequest) -> bool:
        agreement = StopAgreement(self.world.size, lambda: stop.requested)
        self.callbacks.begin()
        if self._evaluation_due(None) and not self._evaluate(stop):
            self._save()
            return False
        if self.divergence.may_rewind and self.saved_step is None:
            self._save()  # the checkpoint that the first steps can go back to
        finished: bool | None = True if self.callbacks.agree_to_stop() else None
        while finished is None and not self.length.at_end():
            finished = self._train_from_position(stop, agreement)
        return finished is not False

    def _train_from_position(self, stop: StopRequest, agreement: StopAgreement) -> bool | None:
        """Trains on the batches from the session's position on. Returns True at the end of the run, False if the run
        was stopped, and None if it went back to a checkpoint, so that its batches begin at another position."""
        train = self.job.train
        self.shares.restore(self.session.steps)
        batches = self.session.batches(
            self.train_set, train.epochs, train.global_batch, self.loading, self.job.data.drop_last
        )
        recorded = self.recorded_steps if self.session.steps == 0 else 0  # the first steps of a resumed run are over
        with closing(batches), record_steps(self.session, self.folder.record, recorded) as step:  # type: ignore[type-var]
            self._report("data")
            for batch in self.meter.waiting(batches):
                agreement.start()
                is_left_out = (batch.epoch, batch.index) in self.left_out
                if is_left_out:
                    self.session.leave_out(batch)
                else:
                    self.last_loss = step(batch)
                if problem := self.divergence.reason_to_rewind(self.session.nonfinite, self.session.spike):
                    agreement.result()  # a stop request is still there after the next step
                    self._rewind(batch, problem)
                    return None
                self.heartbeat.finish_step()
                self.meter.step(batch.samples)
                self.display.advance(self.session.steps)
                if not is_left_out:
                    self._log(batch)
                    assert self.last_loss is not None
                    self.callbacks.step(self.session.steps, self.last_loss)
                self._log_nonfinite(batch, is_left_out)
                if self._evaluation_due(batch) and not self._evaluate(stop):
                    self._save()
                    return False
                if self._save_due():
                    self._save()
                stop_requested = agreement.result()
                if self.callbacks.agree_to_stop():
                    break
                if stop_requested:
                    self._save()
                    return False
                if self.length.at_end():
                    break
                self._report("data")
        return True

    def _finish(self) -> dict[str, Any]:
        """Evaluates, saves, and writes the result, which marks the run as finished; its times are this rank's."""
        self.divergence.at_end(self.session.steps, self.session.skipped_steps)
        if self.eval_set is not None and not self._is_evaluated():
            self._evaluate(None)
        if not self._save():
            raise TrainingDiverged(f"the run ends after step {self.session.steps}, {self._describe_saved()}")
        self.checkpoints.finish()
        self.divergence.check_last_evaluation(self.last_evaluation)
        self._report("result")
        result = {**self._describe_result(), **expert_result(self.session, self.display, self.world.rank)}
        if self.world.rank == 0 and (line := describe_wait(self.meter.loader_share, self.job.data.workers)):
            self.display.line(line)
        if self.world.rank == 0:
            write_atomically(self.folder.result, json.dumps(result, indent=1))
        return result

    def _describe_result(self) -> dict[str, Any]:
        """Returns the content of result.json."""
        loss = None if self.last_loss is None else float(self.last_loss)
        metrics = self.last_evaluation[1] if self.last_evaluation else {}
        stopped = self.callbacks.stopped
        return {
            "run": str(self.folder.path.resolve()),
            "steps": self.session.steps,
            "loss": finite_or_none(loss),
            "metrics": {name: finite_or_none(value) for name, value in metrics.items()},
            "samples_per_s": self.meter.samples_per_s,
            "loader_share": self.meter.loader_share,
            "skipped_steps": self.session.skipped_steps,
            "restarts": self.world.attempt,
            "predicted_step_s": self.predicted_step_s,
            "measured_step_s": self.meter.step_s,
            **self.checkpoints.median_times(),
            **recovery_figures(self.folder),
            "peak_memory_bytes": self._peak_memory_bytes(),
            **({} if stopped is None else {"stopped": stopped}),
            **(self.stragglers.result() | self.shares.result()),
        }

    def _peak_memory_bytes(self) -> int:
        return largest_peak_memory_bytes(self.world)

    # ---- logs

    def _log(self, batch: Batch) -> None:
        steps = self.session.steps
        if self.last_loss is None or (steps % self.job.log.every_steps and not self.length.at_end()):
            return
        more = {**expert_metrics(self.session), **self.shares.metrics(batch.samples)}  # all ranks together
        if self.metrics_log is None:
            return
        loss = float(self.last_loss)
        rate = self.meter.end_window()
        self.display.step(steps, loss, rate)
        self.heartbeat.update(steps, "log")
        values = {"loss": loss, "lr": self.session.optimizer.param_groups[0]["lr"], "samples_per_s": rate}
        self.metrics_log.write("train", steps, batch.epoch, {**values, **more})
        self.stragglers.look()
        self.fallbacks.update()

    # ---- steps that are left out

    def _log_nonfinite(self, batch: Batch, is_left_out: bool) -> None:
        """Tells the user, and writes to the metrics log, if the update of the last step was left out, or its batch.
        Raises `TrainingDiverged` if that was so in too many steps in a row."""
        steps, skipped, problem, loss = self.session.steps, self.session.skipped_steps, self.session.nonfinite, None
        line: str | None = f"step {steps}: batch {batch.index} of epoch {batch.epoch} is left out"
        if not is_left_out:
            loss = self.last_loss
            assert loss is not None
            line = self.divergence.after_step(steps, loss, problem, skipped)
            line = self.divergence.after_spike(steps, self.session.spike, skipped) or line
        if line:
            self.display.line(line)
        if self.metrics_log and (is_left_out or problem or self.session.spike):
            values = {"loss": None if loss is None else float(loss), "skipped_steps": skipped}
            self.metrics_log.write("skipped", steps, batch.epoch, values)

    def _rewind(self, batch: Batch, problem: str) -> None:
        """Goes back to the newest checkpoint because of a problem in the step on this batch. It is left out from now
        on."""
        step = self.session.steps
        self.divergence.note_rewind(step, problem)
        self.meter.pause()
        self.heartbeat.update(step, "load checkpoint")
        self.left_out.add((batch.epoch, batch.index))
        newest, _ = self.checkpoints.find_newest()
        if newest is None:
            raise TrainingDiverged(f"step {step}: {problem}, and there is no valid checkpoint to go back to")
        self._restore(newest)
        if self.metrics_log:
            self.metrics_log.close()
        self.metrics_log = self._open_metrics_log()
        left_out = f"batch {batch.index} of epoch {batch.epoch} is left out from now on"
        self.display.line(f"step {step}: {problem}: going back to step {self.session.steps}; {left_out}")

    # ---- evaluation

    def _evaluation_due(self, batch: Batch | None) -> bool:
        """Whether to evaluate now: after every `eval_every_steps` steps or every epoch, and at the end. `batch` is the
        batch of the step just made. It is None before the loop: a resumed run evaluates there if its last step should
        have been evaluated but the evaluation was interrupted."""
        if self.eval_set is None or self._is_evaluated() or self.session.steps == 0:
            return False
        if self.length.at_end():
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

        def interrupted() -> bool:
            self.heartbeat.go_on()
            return stop is not None and stop.requested

        with self.display.activity("evaluating"):
            values = self.session.evaluate(
                self.eval_set, self.metrics, self.job.train.global_batch, self.loading, interrupted
            )
        if values is None:
            return False
        step = self.session.steps
        self.last_evaluation = (step, values)
        self.display.line(f"evaluation after step {step}: {describe_metrics(values)}")
        if self.metrics_log:
            self.metrics_log.write("eval", step, self.session.position[0], dict(values))
        step_after_evaluation(self.session, self.job.schedule.metric if self.job.schedule else None, values)
        self.callbacks.evaluation(values)
        name = self.job.checkpoint.best
        if name and self.checkpoints.is_better(value := evaluated_value(values, name, "checkpoint.best"), self.best):
            previous, self.best = self.best, BestCheckpoint(step, value)
            if not self._save():
                self.best = previous
        return True

    # ---- checkpoints

    def _save_due(self) -> bool:
        every = self.job.checkpoint.every_steps
        return every is not None and self.session.steps % every == 0

    def _save(self) -> bool:
        """Saves a checkpoint of the current step unless this step is saved already, and deletes old checkpoints. All
        ranks call this together. Returns False if it does not save, because some weight or optimizer entry is NaN or
        infinite: such a checkpoint would replace one that is good."""
        step, begin = self.session.steps, time.perf_counter()
        if self.saved_step == step:
            return True
        self.meter.pause()
        self.heartbeat.update(step, "save")
        state = self.session.state()
        about = {
            **self.session.about(),
            "plan": self.session.plan.model_dump(),
            "loss": None if self.last_loss is None else finite_or_none(float(self.last_loss)),
            "evaluated": list(self.last_evaluation) if self.last_evaluation else None,
            "best": [self.best.step, self.best.value] if self.best else None,
            "left_out": sorted(map(list, self.left_out)),
        }
        try:
            with self.display.activity("saving"):
                path = self.checkpoints.save(state, step, about, self.best, begin, wait=self.callbacks.handle("save"))
        except NotFiniteError as name:
            if not self.told_not_saved:
                self.display.line(f"step {step} is not saved: {name} is not finite")
            self.told_not_saved = True
            return False
        self.saved_step, self.told_not_saved = step, False
        self.divergence.note_checkpoint()
        self.callbacks.save(path)
        return True

    def _describe_saved(self) -> str:
        """Whether the current step is saved, in words."""
        if self.saved_step == self.session.steps:
            return "which is saved"
        newest = "there is no checkpoint" if self.saved_step is None else f"the newest one saved is {self.saved_step}"
        return f"which is not saved, because its weights or its optimizer state are not finite; {newest}"

    def _resume(self) -> str:
        """Resumes from the newest valid checkpoint, if there is one. Returns a message that says where the run starts
        and which checkpoints are not used."""
        self._report("load checkpoint")
        self.checkpoints.clear_unfinished()
        newest, problems = self.checkpoints.find_newest()
        damaged = "".join(f"checkpoint left out: {problem}\n" for problem in problems)
        if newest is None:
            return f"{damaged}training on {self._describe_ranks()}"
        self._restore(newest)
        return f"{damaged}resuming after step {self.session.steps} on {self._describe_ranks()}"

    def _restore(self, checkpoint: SavedCheckpoint) -> None:
        about = checkpoint.manifest.about
        self.session.restore(checkpoint.path, checkpoint.manifest)
        self.saved_step = self.session.steps
        loss, evaluated, best = about["loss"], about["evaluated"], about["best"]
        self.last_loss = None if loss is None else torch.tensor(loss, dtype=torch.float64)
        self.last_evaluation = (int(evaluated[0]), evaluated[1]) if evaluated else None
        self.best = BestCheckpoint(int(best[0]), float(best[1])) if best else None
        self.left_out |= {(int(epoch), int(index)) for epoch, index in about.get("left_out", ())}

    def _describe_ranks(self) -> str:
        kind = ("GPU" if self.world.device.type == "cuda" else "CPU rank") + "s" * (self.world.size > 1)
        return f"{self.world.size} {kind} ({self.session.plan.summary()}) in {self.folder.path}"
