"""`measure`, the work of `validation.bench faults`: trains a job undisturbed, then again while its ranks are killed at
random moments, and compares the ends of both runs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.job import load_job, load_plan
from validation.bench.faults.report import FaultReport, RunComparison
from validation.bench.faults.run import DisturbedRun, StartCommand, disturbed_run, start_command
from validation.bench.faults.schedule import plan_kills

# A run that is killed often needs checkpoints often. --set gives other values.
_INTERVALS = ("checkpoint.every_steps=10", "log.eval_every_steps=40", "log.tensorboard=false")


@dataclass(frozen=True)
class FaultRequest:
    """What is measured: a job, by its file and its name, with the options that `train` also has; how many ranks are
    killed, with the spare process and in another run without it; and the seed that decides when."""

    job_file: str
    name: str
    plan_file: str | None
    cluster: str | None
    settings: Sequence[str]
    kills: int
    kills_without_spare: int
    seed: int

    def words(self, plan_file: Path | None, *settings: str) -> list[str]:
        """The words of the command that trains it under this plan, or the job's if it is None."""
        plan = self.plan_file if plan_file is None else str(plan_file)
        options = {"--plan": plan, "--cluster": self.cluster}
        words = ["train", self.job_file, *(word for name, value in options.items() if value for word in (name, value))]
        # The first value of a field that is set twice is replaced by the second one.
        return [*words, *(word for setting in (*_INTERVALS, *self.settings, *settings) for word in ("--set", setting))]


def measure(
    request: FaultRequest,
    folder: Path,
    phase: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext(),
    start: StartCommand = start_command,
) -> FaultReport:
    """Trains three times, in folders below `folder`: undisturbed, with kills, and with kills but without the spare
    process. `phase` names to the user what is done within a context."""
    with phase("benching: training undisturbed, to compare with"):
        undisturbed = disturbed_run(request.words(None), folder / "undisturbed", request.name, start=start)
    plan = load_plan(undisturbed.folder.plan)
    if plan.gradients.servers:
        raise InputError(
            f"the plan ({plan.summary()}) has parameter servers, whose workers are replaced alone: bench faults is for"
            " plans without servers"
        )
    comparisons = []
    for has_spare, kills in ((True, request.kills), (False, request.kills_without_spare)):
        if kills:
            spare = "with" if has_spare else "without"
            with phase(f"benching: {kills} kills {spare} the spare process"):
                comparisons.append(_compare(request, folder / f"{spare}-spare", undisturbed, has_spare, kills, start))
    return FaultReport(request.name, plan.summary(), plan.processes, request.seed, tuple(comparisons))


def _compare(
    request: FaultRequest,
    folder: Path,
    undisturbed: DisturbedRun,
    has_spare: bool,
    kills: int,
    start: StartCommand,
) -> RunComparison:
    job, plan = load_job(undisturbed.folder.job), load_plan(undisturbed.folder.plan)
    planned = plan_kills(
        request.seed,
        kills,
        plan.processes,
        int(undisturbed.result["steps"]),
        save_every=job.checkpoint.every_steps,
        evaluate_every=job.log.eval_every_steps if job.data.eval else None,
    )
    # If a kill cost more than one restart, the run would end, unless it may have some more.
    settings = [f"train.spare={str(has_spare).lower()}", f"train.restarts={2 * kills}"]
    words = request.words(undisturbed.folder.plan, *settings)
    run = disturbed_run(words, folder, request.name, planned, start)
    return RunComparison(
        has_spare=has_spare,
        planned=kills,
        run=run,
        is_bitwise_equal=run.checksums == undisturbed.checksums and run.losses == undisturbed.losses,
        leftovers=(*undisturbed.leftovers, *run.leftovers),
    )
