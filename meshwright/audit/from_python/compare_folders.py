"""`mw.compare`: compares two records, of `mw.record` or of `meshwright audit --records`."""

from dataclasses import replace
from pathlib import Path

from meshwright.audit.audit import compare as compare_runs
from meshwright.audit.from_python.align import align_names
from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder.settings import Settings
from meshwright.audit.result import Audit
from meshwright.errors import InputError


def compare(reference: str | Path, candidate: str | Path, *, noise: str | Path | None = None) -> Audit:
    """Compares the training that was recorded in the folder `candidate` with that in `reference`, which is taken as
    right, as `meshwright audit` does. Print the result, or look at `equal`, `comparable`, `first_difference` (with
    `step`, `what`, `name`, `error`), `explained` (its `cause`) and `to_dict()`.

    `noise` is the folder of the reference's training from weights that are changed by rounding (`mw.record` with
    `rounding=True`). It shows what rounding changes in this model; without it, that is estimated from the types.

    >>> import tempfile, torch, meshwright as mw
    >>> def train(factor):
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Linear(4, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     folder = tempfile.mkdtemp()
    ...     with mw.record(folder, model, optimizer, steps=1):
    ...         model(torch.eye(4)).mean().mul(factor).backward()
    ...         optimizer.step()
    ...     return folder
    >>> result = mw.compare(train(1.0), train(2.0))
    >>> print(result.headline)
    Not equal: the gradient of bias in step 1 is 1.00e+00 off
    >>> result.explained.cause
    'scaled'
    """
    runs = [_read(folder) for folder in (reference, candidate, *([] if noise is None else [noise]))]
    align_names(runs[1], runs[0])
    result = compare_runs(runs[0], runs[1], runs[2] if noise is not None else None)
    notes = (*result.notes, *filter(None, map(_unfinished, runs)))
    return replace(result, reference=str(reference), candidate=str(candidate), notes=notes)


def _unfinished(run: RecordedRun) -> str | None:
    """Says that a block raised before all steps were recorded that it was asked for."""
    ends = [event for event in run.events("end") if event["reason"] == "error"]
    if not ends or run.steps >= Settings.read(run.folder).steps:
        return None
    return f"{run.folder.name} failed on rank {ends[0].rank} after step {run.steps}: {ends[0]['message']}"


def is_record(folder: Path) -> bool:
    """Whether this is the folder of a record."""
    return (folder / "settings.json").exists() and any(folder.glob("rank-*/header.json"))


def _read(folder: str | Path) -> RecordedRun:
    place = Path(folder)
    if not is_record(place):
        raise InputError(f"{folder}: there is no record in this folder, as mw.record or audit --records write it")
    run = RecordedRun(place)
    world = max(int(rank.header["world_size"]) for rank in run.ranks)
    if run.world_size < world:
        raise InputError(f"{folder}: {run.world_size} of {world} ranks were recorded: call mw.record on each rank")
    if not run.steps:
        ends = [event["message"] for event in run.events("end") if event["message"]]
        raise InputError(f"{folder}: no step of an optimizer was recorded" + (f": {ends[0]}" if ends else ""))
    return run
