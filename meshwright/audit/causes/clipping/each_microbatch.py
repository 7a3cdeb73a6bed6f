"""The cause `clipped_each_microbatch`: gradients are clipped while they are still being accumulated."""

from collections import Counter

from meshwright.audit.causes.wording import list_names, list_ranks, number
from meshwright.audit.evidence import Evidence, Verdict
from meshwright.audit.recorded_run import Event, RecordedRun

_GRADIENTS_NOT_COMPUTED = 1.5  # the residual: any cause whose gradients fit is preferred


def clipped_each_microbatch(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if gradients differ, and the candidate clips those of the same parameters more often in a step
    than the reference, not only the last time with an effect. What was recorded before is a part of the sum."""
    if not evidence.differing_gradients:
        return None
    times, usual = (_times(run, evidence.step) for run in (evidence.candidate, evidence.reference))
    if times <= usual or times < 2:
        return None
    earlier = _earlier(evidence.candidate, evidence.step)
    effective = [event for event in earlier if event["limit"] is not None and event["value"] > event["limit"]]
    if not effective:
        return None
    first = effective[0]
    return Verdict(
        "clipped_each_microbatch",
        f"the candidate clips the gradients of {list_names(first['names'])} {times} times in the step, the reference"
        f" {usual}: before the last time, a norm of {number(first['value'])} on {list_ranks([first.rank])} was clipped"
        f" to {number(first['limit'])}. So the sum of the micro-batches is clipped before it is complete: clip once,"
        " right before the optimizer step",
        _GRADIENTS_NOT_COMPUTED,
    )


def _groups(run: RecordedRun, step: int) -> dict[tuple[int, tuple[str, ...]], list[Event]]:
    """The norms of a step by rank and parameters, in their order."""
    groups: dict[tuple[int, tuple[str, ...]], list[Event]] = {}
    for event in run.events("norm", step):
        groups.setdefault((event.rank, tuple(event["names"])), []).append(event)
    return groups


def _times(run: RecordedRun, step: int) -> int:
    """How often a rank clips the gradients of one parameter in a step."""
    counts: Counter[tuple[int, str]] = Counter()
    for (rank, names), events in _groups(run, step).items():
        counts.update({(rank, name): len(events) for name in names})
    return max(counts.values(), default=0)


def _earlier(run: RecordedRun, step: int) -> list[Event]:
    """All norms of a step but the last ones of their parameters."""
    return [event for events in _groups(run, step).values() for event in events[:-1]]
