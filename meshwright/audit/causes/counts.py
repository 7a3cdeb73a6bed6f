"""`counts_of`: the numbers of a training that its gradients may be multiplied or divided by, and `recognize`, which
finds those that a factor equals."""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.audit.causes.copies import fewest_copies
from meshwright.audit.causes.samples import arguments, ranks_by_samples
from meshwright.audit.causes.wording import number
from meshwright.audit.evidence import Evidence
from meshwright.audit.recorded_run import RecordedRun

_MOST_SHOWN = 64


@dataclass(frozen=True)
class Count:
    """A number of a training: what it is, and what usually multiplies or divides gradients by it."""

    text: str
    value: float
    times: str = ""
    divided: str = ""

    @property
    def is_size(self) -> bool:
        """Whether it counts ranks or micro-batches, of which two may be multiplied. Of other numbers there are so many
        products that one of them may equal any factor."""
        return "ranks" in self.text or "micro-batches" in self.text


def counts_of(evidence: Evidence, names: Iterable[str] = ()) -> list[Count]:
    """The counts of the candidate and of the reference that are not 1. `names` are the parameters they are for."""
    counts = [
        *_rank_counts(evidence.candidate, evidence.step),
        *_microbatch_counts(evidence),
        *_batch_counts(evidence.candidate, evidence.step),
        *_scales(evidence),
    ]
    held = {fewest_copies(evidence, name) for name in names}
    if len(held) == 1 and next(iter(held)) not in (0, 1, evidence.candidate.world_size):
        counts.append(
            Count("the number of ranks that hold a copy", next(iter(held)), "a sum over them", "a mean over them")
        )
    if evidence.reference.world_size > 1:
        counts += [
            Count(f"{count.text} of the reference", count.value, count.divided, count.times)
            for count in _rank_counts(evidence.reference, evidence.step)
        ]
    return [count for count in counts if count.value > 0 and abs(count.value - 1) > 1e-6]


def data_ranks(run: RecordedRun, step: int) -> int:
    """The number of ranks with different samples; 0 if that was not recorded."""
    return len(ranks_by_samples(run, step))


def microbatches(run: RecordedRun, step: int) -> int:
    """How often a rank called backward on a loss in a step, or called its model where no loss was seen."""
    losses: dict[int, int] = {}
    for event in run.events("loss", step):
        losses[event.rank] = losses.get(event.rank, 0) + 1
    if losses:
        return max(losses.values())
    calls = [event.rank for events in list(arguments(run, step).values())[:1] for event in events]
    return max((calls.count(rank) for rank in set(calls)), default=0)


def valid_targets(run: RecordedRun, step: int) -> tuple[int, int]:
    """The numbers of valid targets and of all targets of a step; ranks with the same samples count once."""
    groups = ranks_by_samples(run, step)
    first = {ranks[0] for ranks in groups}
    events = [event for event in run.events("targets", step) if not groups or event.rank in first]
    return sum(event["valid"] for event in events), sum(event["total"] for event in events)


def _rank_counts(run: RecordedRun, step: int) -> list[Count]:
    ranks, different = run.world_size, data_ranks(run, step)
    summed = "gradients are summed over ranks and not averaged, or the loss is multiplied by their number"
    twice = "gradients are divided by it once too often, as when a divided loss is averaged over ranks again"
    if different in (0, 1):
        kind = ", which all have the same samples" if different and ranks > 1 else ""
        return [Count(f"the number of ranks{kind}", ranks, summed, twice)]
    if different == ranks:
        return [Count("the number of ranks (all have different samples)", ranks, summed, twice)]
    same = (
        "a sum over ranks that hold the same gradient, as over a tensor group",
        "a mean over ranks that should be summed or left alone, as over a tensor group",
    )
    return [
        Count("the number of ranks with different samples", different, summed, twice),
        Count("the number of ranks that have the same samples", ranks / different, *same),
        Count("the number of all ranks", ranks, "a sum over all ranks", "a mean over all ranks"),
    ]


def _microbatch_counts(evidence: Evidence) -> list[Count]:
    own, right = (microbatches(run, evidence.step) for run in (evidence.candidate, evidence.reference))
    summed = "they are summed: the loss is not divided by their number"
    twice = "the loss is divided by their number once too often"
    counts = [Count("the number of micro-batches in a step", own, summed, twice)]
    if right > 1 and right != own:
        counts.append(Count("the number of the reference's micro-batches in a step", right, twice, summed))
    return counts


def _batch_counts(run: RecordedRun, step: int) -> list[Count]:
    samples = {ranks[0]: 0 for ranks in ranks_by_samples(run, step)}
    for event in next(iter(arguments(run, step).values()), []):
        if event.rank in samples:
            samples[event.rank] += len(event["rows"])
    summed, twice = "the loss is a sum where the reference has the mean", "the loss is divided by it once too often"
    counts = [Count("the number of samples in a step", sum(samples.values()), summed, twice)]
    if len(samples) > 1 and len(set(samples.values())) == 1:
        counts.append(Count("the number of one rank's samples in a step", next(iter(samples.values())), summed, twice))
    valid, total = valid_targets(run, step)
    if total:
        counts.append(Count("the number of valid targets in a step", valid, summed, twice))
        if valid != total:
            counts.append(
                Count(
                    "the share of targets that are valid",
                    valid / total,
                    "the loss is divided by all targets and not by the valid ones",
                    "the loss is divided by the valid targets, the reference's by all",
                )
            )
    return counts


def _scales(evidence: Evidence) -> list[Count]:
    texts = ("gradients are still multiplied by it (`unscale_` is missing)", "gradients are unscaled twice")
    scales = {float(event["value"]) for event in evidence.candidate.events("scale", evidence.step)}
    return [Count("the loss scale", scale, *texts) for scale in sorted(scales)]


def recognize(factor: float, uncertainty: float, counts: list[Count]) -> str | None:
    """Says which count, or product or ratio of two, the factor is, or its inverse; None if there is none."""

    def is_equal(value: float) -> bool:
        return abs(factor / value - 1) <= uncertainty

    times = [count for count in counts if is_equal(count.value)]
    divided = [count for count in counts if is_equal(1 / count.value)]
    if times or divided:
        texts = [_describe(count, count.times, "") for count in times]
        texts += [_describe(count, count.divided, "one divided by ") for count in divided]
        return ", or ".join(texts[:3])
    sizes = [count for count in counts if count.is_size]
    pairs = [(one, other) for index, one in enumerate(sizes) for other in sizes[index + 1 :]]
    for one, other in pairs:
        if is_equal(one.value * other.value):
            return f"{one.text} times {other.text}"
        if is_equal(1 / (one.value * other.value)):
            return f"one divided by {one.text} times {other.text}"
        if is_equal(one.value / other.value):
            return f"{one.text} divided by {other.text}"
        if is_equal(other.value / one.value):
            return f"{other.text} divided by {one.text}"
    return None


def describe_factor(factor: float, uncertainty: float, counts: list[Count]) -> str:
    """`recognize`, or a text that says that the factor is none of these numbers."""
    known = recognize(factor, uncertainty, counts)
    if known is not None:
        return known
    for value, text in ((factor, ""), (1 / factor, "one divided by ")):
        if 1 < round(value) <= _MOST_SHOWN and abs(value / round(value) - 1) <= uncertainty:
            return f"this is {text}{round(value)}, but none of the numbers that were recorded"
    return "this is none of the numbers that were recorded (ranks, micro-batches, samples, targets)"


def _describe(count: Count, reason: str, before: str) -> str:
    value = int(count.value) if count.value == int(count.value) else number(count.value)
    return f"{before}{count.text} ({value}){f': {reason}' if reason else ''}"


def valid_targets_of(run: RecordedRun, step: int, rank: int) -> int:
    """The number of valid targets that one rank had in a step."""
    return sum(event["valid"] for event in run.events("targets", step) if event.rank == rank)
