"""`compare_trainings`: compares two trainings that are given as commands, records or functions. The pytest fixture
`assert_same_training` calls it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.audit.audit import AuditRequest, audit, record, settings_of
from meshwright.audit.from_python.compare_folders import compare, is_record
from meshwright.audit.from_python.record import record_with
from meshwright.audit.recorder.settings import Settings
from meshwright.audit.recorder.whole import read_ranks
from meshwright.audit.result import Audit
from meshwright.audit.rounding import eps_of, perturbation
from meshwright.errors import InputError

Record = Callable[[Any, Any], AbstractContextManager[None]]
Run = str | Path | Callable[[Record], Any]


def compare_trainings(reference: Run, candidate: Run, folder: Path, request: AuditRequest) -> Audit:
    """Compares two trainings, and writes what has to be recorded into `folder`. Each is a command, the folder of a
    record, or a function that is called with `record` and trains in `with record(model, optimizer):`. A reference that
    can run again runs a second time, to see what rounding changes. Two commands are audited as on the command line,
    also from a second start."""
    if not any(callable(run) or _is_folder(run) for run in (reference, candidate)):
        return audit(replace(request, reference=str(reference), candidate=str(candidate)), folder)
    settings = settings_of(request)
    right = _recorded("the reference", reference, folder / "reference", request, settings)
    continued = replace(settings, reference=str(right.resolve()))
    own = _recorded("the candidate", candidate, folder / "candidate", request, continued)
    if _is_folder(reference):
        return compare(right, own)
    eps = eps_of({dtype for place in (right, own) for rank in read_ranks(place) for dtype in rank.header["dtypes"]})
    perturbed = replace(continued, perturb=perturbation(eps))
    noise = _recorded("the reference, changed by rounding", reference, folder / "rounding", request, perturbed)
    return compare(right, own, noise=noise)


def _recorded(who: str, run: Run, folder: Path, request: AuditRequest, settings: Settings) -> Path:
    """Returns the folder of the record."""
    if callable(run):
        run(partial(record_with, folder, settings))
        if not is_record(folder):
            raise InputError(f"{who} recorded nothing: train in `with record(model, optimizer):`")
    elif _is_folder(run):
        return Path(run)
    else:
        record(who, str(run), request, folder, settings)
    return folder


def _is_folder(run: Run) -> bool:
    return isinstance(run, Path) or (isinstance(run, str) and is_record(Path(run)))
