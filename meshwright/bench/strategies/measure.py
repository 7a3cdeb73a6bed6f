"""Runs one measurement of a strategy in new processes, which are forked from a preloaded one."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.bench.strategies.request import (
    Loop,
    MeasurementRequest,
    ProcessAnswer,
    job_file,
    load_answers,
    plan_file,
)
from meshwright.bench.strategies.time_shares import time_shares
from meshwright.errors import MeshwrightError
from meshwright.files.storage import write_atomically
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.local.launch import RankSettings, launch
from meshwright.train.output.folder import RunFolder, read_result

RANK_MODULE = "meshwright.bench.strategies.rank"
_NOBODY = -1  # no rank prints to the terminal
_GRACE_S = 5.0


@dataclass(frozen=True)
class Measurement:
    """One measurement of a strategy. The fields are those of `StrategyRow`."""

    step_s: float
    loss: float | None
    exchanged_bytes: float | None
    shares: dict[str, float] | None
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Steps:
    """The steps of one measurement: those before the timed ones, the timed ones, and those after them in which the
    processes record what they do. With `records_timed`, they record in the timed steps, which adds about 1% to them."""

    warm_up: int
    timed: int
    sampled: int
    records_timed: bool = False


@dataclass(frozen=True)
class RunnableStrategy:
    """How the processes of a strategy are started: with which loop, under which plan, and with how many threads each.
    `parts` is the number of devices of DataParallel."""

    loop: Loop
    plan: Plan
    device: str
    threads: int
    parts: int = 1

    @property
    def processes(self) -> int:
        return self.plan.processes if self.loop in ("session", "servers") else 1

    def measure(self, job: Job, steps: Steps, folder: Path) -> Measurement:
        """Trains these steps. Files are written to `folder`, which is created."""
        folder.mkdir(parents=True)
        request = MeasurementRequest(
            self.loop, self.device, steps.warm_up, steps.timed, steps.sampled, self.parts, steps.records_timed
        )
        request.save(folder)
        write_atomically(job_file(folder), _job_of_steps(job, steps.warm_up + steps.timed).to_yaml())
        write_atomically(plan_file(folder), self.plan.to_yaml())
        settings = RankSettings(
            self.processes, self.device, self.threads, restarts=0, grace_s=_GRACE_S, speaker=_NOBODY
        )
        launch(RANK_MODULE, [str(folder)], settings, folder / "logs")
        return self._combine(folder)

    def _combine(self, folder: Path) -> Measurement:
        """Returns what the processes have measured together."""
        answers = load_answers(folder, self.processes)
        if not answers:
            raise MeshwrightError("the processes ended without an answer")
        step_s = max((answer.step_s for answer in answers if answer.step_s is not None), default=None)
        loss = answers[0].loss
        if self.loop == "servers":
            result = read_result(RunFolder(folder)) or {}
            step_s, loss = result.get("measured_step_s"), result.get("loss")
        if step_s is None:
            raise MeshwrightError("the steps were too few to be timed: raise --steps")
        sent = [answer.exchanged_bytes for answer in answers if answer.exchanged_bytes is not None]
        return Measurement(
            step_s,
            loss,
            sum(sent) if len(sent) == len(answers) else None,
            self._shares(answers),
            max(answer.peak_memory_bytes for answer in answers),
        )

    def _shares(self, answers: list[ProcessAnswer]) -> dict[str, float] | None:
        known = [answer.shares for answer in answers if answer.shares is not None]
        if known:
            return {name: sum(shares[name] for shares in known) / len(known) for name in known[0]}
        if self.processes == 1 and self.device == "cpu":
            return {"computing": 1.0, "communicating": 0.0, "waiting": 0.0, "bubble": 0.0}
        is_asynchronous = self.loop == "servers" and self.plan.gradients.updates != "synchronous"
        samples = [answer.samples for answer in answers]
        return time_shares(samples, is_pipeline=self.plan.axes.pipeline > 1, is_asynchronous=is_asynchronous)


def _job_of_steps(job: Job, steps: int) -> Job:
    return job.model_copy(update={"train": job.train.model_copy(update={"steps": steps, "epochs": None})})
