"""`audit`: runs two commands that train, records them from outside, and compares what they computed."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.audit.comparison.again import decide
from meshwright.audit.comparison.compare import RecordComparison, compare_records
from meshwright.audit.evidence import Evidence
from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder.settings import SKETCH_ABOVE, Settings
from meshwright.audit.result import Audit
from meshwright.audit.rounding import eps_of, perturbation
from meshwright.audit.run_command import FinishedCommand, run_recorded
from meshwright.errors import InputError, MeshwrightError
from meshwright.progress import phase

STARTS = ("random", "reference", "own")
_SHIFT = 2.0**-7  # of the weights, for a second start that is not drawn
_BETWEEN_SEEDS = 10


@dataclass(frozen=True)
class AuditRequest:
    """`reference` is the command that is taken as right. `start` says which weights both start from: `random` ones at a
    healthy scale, those of the `reference`, or each command's `own`. `full` records all elements of large
    tensors, and not their sketches. `timeout_s` holds for each command."""

    reference: str
    candidate: str
    steps: int = 3
    start: str = "random"
    keep_dropout: bool = False
    full: bool = False
    cpu: bool = False
    timeout_s: float = 3600.0
    threads: int | None = None


class AuditFailed(MeshwrightError):
    """A command failed, or did not train, so that there is nothing to compare. `lines` are the last of its output."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines


def audit(request: AuditRequest, folder: Path) -> Audit:
    """Runs both commands, and the reference a second time from weights changed by rounding. A difference that rounding
    may have caused is looked for again from another start. The records are written into `folder`."""
    _check(request)
    began = time.monotonic()
    results: list[Audit] = []
    result = None
    while result is None:
        number = len(results)
        results.append(_audit_from(request, folder / f"start-{number + 1}" if number else folder, number))
        result = decide(results)
    return replace(
        result,
        reference=request.reference,
        candidate=request.candidate,
        start=request.start,
        seconds=time.monotonic() - began,
    )


def _audit_from(request: AuditRequest, folder: Path, number: int) -> Audit:
    """Records all trainings from the start of this number, and compares them."""
    settings = replace(
        settings_of(request),
        seed=number * _BETWEEN_SEEDS,
        shift=_SHIFT if number and request.start != "random" else 0.0,
    )
    reference = record("the reference", request.reference, request, folder / "reference", settings)
    continued = replace(settings, reference=str((folder / "reference").resolve()))
    candidate = record("the candidate", request.candidate, request, folder / "candidate", continued)
    eps = eps_of(reference.dtypes | candidate.dtypes)
    perturbed = replace(continued, perturb=perturbation(eps))
    noise = record("the reference, changed by rounding", request.reference, request, folder / "rounding", perturbed)
    return compare(reference, candidate, noise)


def settings_of(request: AuditRequest) -> Settings:
    return Settings(
        steps=request.steps,
        start=request.start,
        keep_dropout=request.keep_dropout,
        sketch_above=None if request.full else SKETCH_ABOVE,
    )


def compare(reference: RecordedRun, candidate: RecordedRun, noise: RecordedRun | None) -> Audit:
    """Compares two records that were made with the same start."""
    from meshwright.audit.causes.diagnose import diagnose
    from meshwright.audit.causes.samples import explain_samples

    runs = [run for run in (reference, candidate, noise) if run is not None]
    limits = [run.sketch_above for run in runs if run.sketch_above is not None]
    for run in runs:
        run.sketch_above = min(limits, default=None)
    comparison = compare_records(reference, candidate, noise)
    samples = next(filter(None, (explain_samples(reference, candidate, step) for step in _compared(comparison))), None)
    explained = None
    if comparison.first is not None:
        explained = diagnose(_evidence(reference, candidate, comparison))
    return Audit.of(reference, candidate, comparison, samples, explained)


def _compared(comparison: RecordComparison) -> range:
    first = comparison.first
    return range(1, (max(1, first.step) if first else comparison.steps) + 1)


def _evidence(reference: RecordedRun, candidate: RecordedRun, comparison: RecordComparison) -> Evidence:
    first = comparison.first
    assert first is not None
    by_kind: dict[str, tuple[object, ...]] = {}
    for difference in comparison.differences:
        if difference.step == first.step:
            by_kind[difference.what] = (*by_kind.get(difference.what, ()), difference)
    return Evidence(reference, candidate, first, by_kind, comparison.bounds)  # type: ignore[arg-type]


def _check(request: AuditRequest) -> None:
    if request.start not in STARTS:
        raise InputError(f"--start {request.start}: choose {', '.join(STARTS)}")
    if request.steps < 1:
        raise InputError(f"--steps {request.steps}: take at least one")


def record(who: str, command: str, request: AuditRequest, folder: Path, settings: Settings) -> RecordedRun:
    with phase(f"recording {who}: {command}"):
        finished = run_recorded(
            command, folder, settings, timeout_s=request.timeout_s, cpu=request.cpu, threads=request.threads
        )
    run = RecordedRun(folder)
    _check_record(who, run, finished, request.steps)
    return run


def _check_record(who: str, run: RecordedRun, finished: FinishedCommand, steps: int) -> None:
    """Raises AuditFailed if the command failed before all steps were recorded, or trained nothing. How its processes
    end after these steps does not count: Gloo's threads may crash when another rank has left."""
    complete = run.ranks and run.steps >= steps and run.world_size == _world(run)
    if complete or (run.steps and not finished.exit_code and not finished.timed_out):
        return
    why = _why_incomplete(run, finished, steps)
    raise AuditFailed(f"{who} ({finished.command}) {why}", finished.last_lines)


def _why_incomplete(run: RecordedRun, finished: FinishedCommand, steps: int) -> str:
    if not run.ranks:
        trained = "called no model in training mode"
    elif not run.steps:
        trained = "took no optimizer step (torch.optim.Optimizer.step) with parameters of its model"
    elif len({rank.header["world_size"] for rank in run.ranks}) > 1 or run.world_size < _world(run):
        trained = f"trained on {_world(run)} ranks, of which {run.world_size} were recorded"
    else:
        trained = f"recorded {run.steps} of {steps} steps"
    if finished.timed_out:
        return f"{trained}, and was ended by --timeout"
    if finished.exit_code:
        messages = [event["message"] for event in run.events("end") if event["reason"] == "error"]
        said = f": {messages[0]}" if messages else ""
        return f"{trained}, and failed with exit code {finished.exit_code}{said}"
    return trained


def _world(run: RecordedRun) -> int:
    return max(int(rank.header["world_size"]) for rank in run.ranks)


@contextmanager
def records_folder(kept: Path | None, make: Callable[[], Path]) -> Iterator[Path]:
    """The folder that records are written into: `kept`, or a temporary one that is deleted at the end."""
    if kept is not None:
        if kept.exists() and any(kept.iterdir()):
            raise InputError(f"--records {kept}: this folder is not empty")
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    folder = make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["Audit", "AuditFailed", "AuditRequest", "audit", "compare", "record", "records_folder"]
