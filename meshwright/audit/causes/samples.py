"""`explain_samples`: whether two trainings computed a step on the same samples, from the digests of what their models
were called with. And which ranks of a training have the same samples."""

from collections import Counter
from collections.abc import Iterable

from meshwright.audit.causes.wording import list_ranks
from meshwright.audit.evidence import Evidence, Verdict
from meshwright.audit.recorded_run import Event, RecordedRun

_MODULUS = 2**64  # of the sums of digests

Rows = dict[int, tuple[str, ...]]  # the digests of the rows that each rank saw, in their order


def other_samples(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the step was computed on other samples."""
    sentence = explain_samples(evidence.reference, evidence.candidate, evidence.step)
    return None if sentence is None else Verdict("other_samples", sentence)


def explain_samples(reference: RecordedRun, candidate: RecordedRun, step: int) -> str | None:
    """Says in which way the candidate computed a step on other samples. None if both saw the same ones, in any order
    and division over ranks and micro-batches, or if the inputs of a side were not recorded."""
    pair = _comparable_arguments(reference, candidate, step)
    if pair is None:
        return None
    right, seen = pair
    expected, rows = rows_by_rank(right), rows_by_rank(seen)
    if _same(expected, rows) or _same_elements(right, seen):
        return None
    return _describe(reference, candidate, step, expected, rows) + _shuffling(reference, candidate)


def ranks_by_samples(run: RecordedRun, step: int) -> list[tuple[int, ...]]:
    """Groups of ranks whose models were called with the same rows; without later stages of a pipeline."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, rows in rows_by_rank(_sample_events(run, step)).items():
        groups.setdefault(rows, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def rows_by_rank(events: Iterable[Event]) -> Rows:
    rows: dict[int, tuple[str, ...]] = {}
    for event in events:
        rows[event.rank] = (*rows.get(event.rank, ()), *event["rows"])
    return rows


# ---- which argument holds the samples


def arguments(run: RecordedRun, step: int) -> dict[str, list[Event]]:
    """What the models of the first pipeline stage were called with, by the argument's place, in order."""
    later = _later_stages(run)
    by_leaf: dict[str, list[Event]] = {}
    for event in run.events("inputs", step):
        if event.rank not in later:
            by_leaf.setdefault(event["leaf"], []).append(event)
    return {leaf: _without_trials(events) for leaf, events in by_leaf.items()}


def _later_stages(run: RecordedRun) -> set[int]:
    """The ranks of later stages of a pipeline. Where the number of the stage is not known, those that have at most one
    parameter (a tied one) in common with the first rank. Ranks with other experts have more."""
    names = {rank.rank: set(rank.header["parameters"]) for rank in run.ranks}
    first = next(iter(names.values()), set())
    common = {rank: len(own & first) for rank, own in names.items()}
    apart = {rank for rank, own in names.items() if common[rank] <= 1 and common[rank] < min(len(own), len(first))}
    return apart | {rank.rank for rank in run.ranks if rank.header["stage"]}


def _without_trials(events: list[Event]) -> list[Event]:
    """The calls without the first one of each rank if the second is the same: pipelines try their stages once with the
    first micro-batch, to see the shapes."""
    seen: dict[int, int] = {}
    kept = []
    for index, event in enumerate(events):
        own = seen[event.rank] = seen.get(event.rank, 0) + 1
        following = events[index + 1 : index + 2]
        is_trial = own == 1 and any(other.rank == event.rank and other["rows"] == event["rows"] for other in following)
        if not is_trial:
            kept.append(event)
    return kept


def _sample_events(run: RecordedRun, step: int) -> list[Event]:
    """The events of the argument that holds the samples: the first one that is no vector and whose rows differ."""
    by_leaf = arguments(run, step)
    ordered = sorted(by_leaf.values(), key=lambda events: (len(events[0]["shape"]) < 2, _has_equal_rows(events)))
    return ordered[0] if ordered else []


def _has_equal_rows(events: list[Event]) -> bool:
    rows = [row for event in events for row in event["rows"]]
    return len(rows) > 1 and len(set(rows)) == 1


def _comparable_arguments(
    reference: RecordedRun, candidate: RecordedRun, step: int
) -> tuple[list[Event], list[Event]] | None:
    right = _sample_events(reference, step)
    if not right:
        return None
    known = {row for event in right for row in event["rows"]}
    by_leaf = arguments(candidate, step)
    of_kind = {leaf: _of_kind(events, right[0]) for leaf, events in by_leaf.items()}
    of_kind = {leaf: events for leaf, events in of_kind.items() if events}
    if not of_kind:
        return None
    own = right[0]["leaf"]
    best = max(of_kind, key=lambda leaf: (_shared(of_kind[leaf], known), leaf == own))
    return right, of_kind[best]


def _of_kind(events: list[Event], like: Event) -> list[Event]:
    """The events whose tensors have as many dimensions, and are integers if the other one is."""
    return [
        event
        for event in events
        if len(event["shape"]) == len(like["shape"]) and ("int" in event["dtype"]) == ("int" in like["dtype"])
    ]


def _shared(events: list[Event], known: set[str]) -> int:
    return len({row for event in events for row in event["rows"]} & known)


# ---- whether they are the same


def _distinct(rows: Rows) -> Counter[str]:
    """How often each row was seen, where ranks that saw exactly the same rows count once."""
    return Counter(row for seen in dict.fromkeys(rows.values()) for row in seen)


def _all(rows: Rows) -> Counter[str]:
    return Counter(row for seen in rows.values() for row in seen)


def _same(expected: Rows, rows: Rows) -> bool:
    """Whether each row was seen equally many times as often."""
    for right in (_distinct(expected), _all(expected)):
        for seen in (_distinct(rows), _all(rows)):
            if right.keys() == seen.keys() and len({seen[row] / right[row] for row in right}) == 1:
                return True
    return False


def _same_elements(right: list[Event], seen: list[Event]) -> bool:
    """Whether all elements are the same, however rows are divided: ranks may hold parts of a sequence."""
    expected, elements = _elements(right), _elements(seen)
    ranks = len({event.rank for event in seen})
    return (
        any(elements[1] == times * expected[0] % _MODULUS for times in range(1, ranks + 1)) or elements[0] in expected
    )


def _elements(events: list[Event]) -> tuple[int, int]:
    """The sum of all elements' digests, of ranks with different rows and of all ranks."""
    rows = rows_by_rank(events)
    first = {seen: rank for rank, seen in reversed(rows.items())}
    sums = [(event.rank, int(event["elements"])) for event in events]
    distinct = sum(value for rank, value in sums if rank in first.values())
    return distinct % _MODULUS, sum(value for _, value in sums) % _MODULUS


# ---- what differs


def _describe(reference: RecordedRun, candidate: RecordedRun, step: int, expected: Rows, rows: Rows) -> str:
    right, seen = _distinct(expected), _distinct(rows)
    shared = sum((right & seen).values())
    ranks = list(rows)
    counts = f"the reference computed step {step} on {right.total()} samples, the candidate on {seen.total()}"
    if len(ranks) > 1 and len(set(rows.values())) == 1 and seen.keys() <= right.keys():
        return (
            f"all of the candidate's {list_ranks(ranks)} computed step {step} on the same {seen.total()} samples, the"
            f" reference on {right.total()}: the ranks do not divide the data (a sampler that is not told the rank)"
        )
    moved = _other_step(reference, candidate, step, seen)
    if moved is not None:
        return moved
    repeated = sum(count - right[row] for row, count in seen.items() if row in right and count > right[row])
    if repeated and seen.keys() <= right.keys():
        missing = len(right.keys() - seen.keys())
        return f"{counts}; {repeated} were seen more often than in the reference, and {missing} were not seen at all"
    joined = _joined_steps(candidate, step, right) or _joined_steps(reference, step, seen)
    if joined is not None:
        one, other = ("reference", "candidate") if seen.keys() < right.keys() else ("candidate", "reference")
        return (
            f"step {step} of the {one} has the samples of the {other}'s steps {step} to {joined}: the {one} accumulates"
            f" the gradients of {joined - step + 1} micro-batches, and the {other} steps after each"
        )
    if seen.keys() < right.keys():
        return f"{counts}; {right.total() - shared} of the reference's samples were not seen, and no others"
    if right.keys() < seen.keys():
        return f"{counts}; {seen.total() - shared} of them are not in the reference's step: its batch is larger"
    return f"{counts}; {shared} of them are the same" if shared else f"{counts}; none of them is the same"


def _other_step(reference: RecordedRun, candidate: RecordedRun, step: int, seen: Counter[str]) -> str | None:
    """Says if the samples are those of another step of the reference, or the same ones in all steps together."""
    steps = range(1, min(reference.steps, candidate.steps) + 1)
    by_step = {other: _distinct(rows_by_rank(_sample_events(reference, other))) for other in steps}
    for other, rows in by_step.items():
        if other != step and rows == seen:
            return f"the candidate's step {step} has the samples of the reference's step {other}: the order is shifted"
    own = sum((_distinct(rows_by_rank(_sample_events(candidate, other))) for other in steps), Counter[str]())
    if own and own == sum(by_step.values(), Counter[str]()):
        return (
            f"in all {len(steps)} steps together the samples are the same, but in another order: step {step} has"
            f" {sum((seen & by_step[step]).values())} of the reference's {by_step[step].total()}"
        )
    return None


def _joined_steps(run: RecordedRun, step: int, rows: Counter[str]) -> int | None:
    """The last of the steps that have these rows together, from a step on; None if more than one have not."""
    joined: Counter[str] = Counter()
    for last in range(step, run.steps + 1):
        joined += _distinct(rows_by_rank(_sample_events(run, last)))
        if joined == rows:
            return last if last > step else None
    return None


def _shuffling(reference: RecordedRun, candidate: RecordedRun) -> str:
    """Says which side's rows come from samplers that shuffle, and who made these."""
    text = ""
    for who, run in (("candidate", candidate), ("reference", reference)):
        made = [tuple(sampler) for rank in run.ranks for sampler in rank.header.get("samplers", ())]
        for sampler, package in dict.fromkeys(made):
            text += f". The {who}'s rows come from a {sampler}, which shuffles"
            if package:
                text += f": the package {package} made it, and not the script, so look for its option for this"
    return text
