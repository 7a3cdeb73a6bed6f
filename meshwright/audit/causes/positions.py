"""The cause `positions_restart`: each rank computes on a part of every sequence, and its positions count up from 0."""

import torch
from torch import Tensor

from meshwright.audit.causes.samples import arguments
from meshwright.audit.causes.wording import list_ranks
from meshwright.audit.evidence import Evidence, Verdict
from meshwright.audit.recorded_run import Event, RecordedRun
from meshwright.audit.recorder.samples import digest_rows


def positions_restart(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if an integer input counts up in the reference, and in the candidate it starts from the same
    number on several ranks that have parts of it; or if ranks have parts of sequences, and rows of a parameter with one
    row for each position have no gradient although the reference's have."""
    if not evidence.differing_gradients:
        return None
    return _in_inputs(evidence) or _in_table(evidence)


def _in_inputs(evidence: Evidence) -> Verdict | None:
    candidate = arguments(evidence.candidate, evidence.step)
    for leaf, events in arguments(evidence.reference, evidence.step).items():
        length = _counted(events[0])
        own = candidate.get(leaf, [])
        if length is None or not own:
            continue
        short = [event for event in own if (_counted(event) or length) < length]
        ranks = {event.rank for event in short}
        parts = _length(short[0]) if short else 0
        if len(ranks) > 1 and parts * len(ranks) >= length:
            return Verdict(
                "positions_restart",
                f"{leaf} counts from 0 to {length - 1} in the reference, and from 0 to {parts - 1} on each of"
                f" {list_ranks(ranks)}, which have parts of the sequences: positions start anew on each rank",
            )
    return None


def _counted(event: Event) -> int | None:
    """The length of an integer argument whose rows all count up from 0; None if it is none."""
    length = _length(event)
    if "int" not in event["dtype"] or length < 2:
        return None
    numbers = torch.arange(length)
    rows = digest_rows(numbers if len(event["shape"]) == 1 else numbers.reshape(1, -1))
    expected = rows if len(event["shape"]) == 1 else rows * len(event["rows"])
    return length if event["rows"] == expected else None


def _length(event: Event) -> int:
    shape = event["shape"]
    return int(shape[-1]) if shape else 0


def _in_table(evidence: Evidence) -> Verdict | None:
    whole, part = (_longest_sequence(run, evidence.step) for run in (evidence.reference, evidence.candidate))
    if not 1 < part < whole:
        return None
    for name in evidence.differing_gradients:
        right, own = evidence.expected(name), evidence.recorded(name)
        if right is None or own is None or right.dim() != 2 or own.shape != right.shape or len(right) < whole:
            continue
        reached, own_reached = (_rows_with_gradient(value) for value in (right, own))
        if reached == list(range(whole)) and own_reached == list(range(part)):
            return Verdict(
                "positions_restart",
                f"the gradient of {name} has {whole} rows that are not zero in the reference, one for each"
                f" position, but only the first {part} in the candidate, whose ranks have {part} positions of each"
                " sequence: positions start anew on each rank",
            )
    return None


def _longest_sequence(run: RecordedRun, step: int) -> int:
    shapes = [event["shape"] for events in arguments(run, step).values() for event in events if "int" in event["dtype"]]
    return max((int(shape[1]) for shape in shapes if len(shape) == 2), default=0)


def _rows_with_gradient(value: Tensor) -> list[int]:
    return [int(row) for row in value.abs().amax(1).nonzero().reshape(-1)]
