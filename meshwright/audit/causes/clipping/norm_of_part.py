"""The cause `norm_of_part`: the norm that gradients are clipped by is not that of all gradients, but of a rank's parts,
without some parameters, or with copies counted several times. Norms are computed from the recorded gradients."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.audit.causes.counts import counts_of, recognize
from meshwright.audit.causes.reductions.tied import tied_pairs
from meshwright.audit.causes.wording import list_names, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict
from meshwright.audit.recorded_run import Event, RecordedRun
from meshwright.audit.recorder.whole import WholeTensors
from meshwright.audit.rounding import eps_of

_LEAST_TOLERANCE, _MOST_TOLERANCE = 2e-6, 5e-3
_FITS_WELL = 0.25  # of the tolerance: of rules that fit so well, the first is named


@dataclass(frozen=True)
class Squares:
    """The squares of the norms of a training's gradients: of each whole gradient by name, and of the parts that each
    rank holds of it. Of `copied` ones several ranks hold the same part."""

    by_name: dict[str, float]
    by_part: dict[tuple[int, str], float]
    copied: frozenset[str]

    @cached_property
    def by_rank(self) -> dict[int, float]:
        squares: dict[int, float] = {}
        for (rank, _), square in self.by_part.items():
            squares[rank] = squares.get(rank, 0.0) + square
        return squares

    @property
    def norm(self) -> float:
        return math.sqrt(sum(self.by_name.values()))

    def of(self, names: Callable[[str], bool]) -> float:
        return sum(square for name, square in self.by_name.items() if names(name))


def norm_of_part(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if gradients before clipping are equal, and one side's norms are explained by one such rule."""
    if evidence.differing_gradients or evidence.difference.what not in ("norm", "clipped gradient", "weight"):
        return None
    for run, who in ((evidence.candidate, "the candidate"), (evidence.reference, "the reference")):
        events = norm_events(run, evidence.step)
        if not events or any(event["partial"] for event in events.values()):
            continue
        squares = gradient_squares(evidence, run)
        tolerance = _tolerance(evidence)
        wrong = {
            rank: event for rank, event in events.items() if not _is(float(event["value"]), squares.norm, tolerance)
        }
        if not wrong:
            continue
        found = [*rules(run, squares, wrong, tolerance), *_constant(evidence, squares, wrong, tolerance)]
        if found:
            # A small part may be missing to the last digit, or a little more than it: the next rule may fit better.
            residual, text = min(found, key=lambda entry: max(entry[0], _FITS_WELL))
            values = ", ".join(f"rank {rank} by {number(event['value'])}" for rank, event in list(wrong.items())[:4])
            return Verdict(
                "norm_of_part",
                f"{who} clips on {values}; the norm of all its gradients, as recorded, is {number(squares.norm)}."
                f" {text}",
                residual,
            )
    return None


def norm_events(run: RecordedRun, step: int) -> dict[int, Event]:
    """The norm of each rank; empty if a rank computed several, which are those of groups of parameters. If it clipped
    groups of parameters by one norm, the names are those of all groups."""
    events: dict[int, Event] = {}
    for event in run.events("norm", step):
        earlier = events.get(event.rank)
        if earlier is not None:
            if earlier["value"] != event["value"]:
                return {}
            names = [*earlier["names"], *event["names"]]
            event = replace(event, values={**event.values, "names": names})
        events[event.rank] = event
    return events


def gradient_squares(evidence: Evidence, run: RecordedRun) -> Squares:
    """The squares of a run's gradients. A weight that is tied in one of the trainings counts once: stages of a pipeline
    hold copies of it under two names."""
    kind = "unclipped" if run.tensors(evidence.step, "unclipped").parts else "gradient"
    tensors = run.tensors(evidence.step, kind)
    again = {name for other in (evidence.reference, evidence.candidate) for name, _ in tied_pairs(other)}
    names = [name for name in tensors.parts if name not in again]
    return squares_of(names, tensors, tensors)


def squares_of(
    names: Iterable[str], wholes: WholeTensors, parts: WholeTensors, factors: Mapping[int, float] | None = None
) -> Squares:
    """The squares of whole gradients, and of each rank's parts; these are taken divided by the rank's factor."""
    by_name = {name: wholes.square(name) for name in names}
    by_part: dict[tuple[int, str], float] = {}
    for name in by_name:
        for (rank, _), square in parts.squares.get(name, {}).items():
            by_part[rank, name] = by_part.get((rank, name), 0.0) + square / (factors[rank] ** 2 if factors else 1)
    regions = {name: [part.region for part in parts.parts.get(name, [])] for name in by_name}
    copied = {name for name, held in regions.items() if len(set(held)) < len(held)}
    return Squares(by_name, by_part, frozenset(copied))


def _tolerance(evidence: Evidence) -> float:
    """How far a norm may be from that of the recorded gradients: what the reference's norm is from that of its own, or
    one rounding of a shorter type. That of two runs' norms is larger."""
    allowed = SLACK * evidence.difference.allowed if evidence.difference.what == "norm" else 1e-4
    run = evidence.reference
    values = [float(event["value"]) for event in norm_events(run, evidence.step).values() if not event["partial"]]
    if values:
        norm = gradient_squares(evidence, run).norm
        eps = eps_of(run.dtypes | evidence.candidate.dtypes)
        own = max(abs(value / norm - 1) for value in values) if norm else allowed
        allowed = min(allowed, max(SLACK * own, eps))
    return min(_MOST_TOLERANCE, max(_LEAST_TOLERANCE, allowed))


def _is(value: float, expected: float, tolerance: float) -> bool:
    return bool(expected) and abs(value / expected - 1) <= tolerance


def rules(run: RecordedRun, squares: Squares, wrong: dict[int, Event], tolerance: float) -> Iterator[tuple[float, str]]:
    """Yields the residual and the text of each rule that gives all wrong norms."""
    values = {rank: float(event["value"]) for rank, event in wrong.items()}

    def fits(expected: Callable[[int], float]) -> float | None:
        rights = {rank: expected(rank) for rank in values}
        if any(not right or not _is(values[rank], right, tolerance) for rank, right in rights.items()):
            return None
        return max(abs(values[rank] / right - 1) for rank, right in rights.items()) / tolerance

    residual = fits(lambda rank: math.sqrt(squares.by_rank.get(rank, 0.0)))
    if residual is not None:
        yield (
            residual,
            "Each of these is the norm of the parts that the rank itself holds: the squares are not summed over the"
            " ranks that hold the other parts",
        )
    for names, text in _left_out(run, squares, wrong):
        rest = squares.of(lambda name, left=names: name not in left)  # type: ignore[misc]
        residual = fits(lambda rank, rest=rest: math.sqrt(rest))  # type: ignore[misc]
        if residual is not None:
            missing = number(math.sqrt(squares.of(lambda name, left=names: name in left)))  # type: ignore[misc]
            yield residual, f"It is the norm without {text} ({list_names(names)}), whose own norm is {missing}"
    yield from _counted_again(squares, values, fits)
    yield from _one_part_counts(squares, fits)


def _left_out(run: RecordedRun, squares: Squares, wrong: dict[int, Event]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Sets of parameters that a norm may lack, the named ones first, with what they have in common."""
    names = tuple(squares.by_name)
    given = {_reference_name(run, rank, name) for rank, event in wrong.items() for name in event["names"]}
    if given:
        yield tuple(name for name in names if name not in given), "the parameters that it was not given"
    yield tuple(name for name in names if "expert" in name.lower()), "the experts"
    yield tuple(name for name in names if name in squares.copied), "the parameters that several ranks hold copies of"
    yield tuple(name for name in names if name not in squares.copied), "the parameters that are divided over ranks"
    yield tuple(name for name in names if len(run.parameters[name]["shape"]) < 2), "the vectors"
    for end in dict.fromkeys(name.rsplit(".", 1)[-1] for name in names):
        yield tuple(name for name in names if name.rsplit(".", 1)[-1] == end), f"the parameters called {end}"
    for name in names:
        yield (name,), "one parameter"
    for rank in squares.by_rank:
        own = tuple(name for name in names if {holder for holder, _ in run.holders(name)} == {rank})
        yield own, f"the parameters that only rank {rank} holds"


def _counted_again(
    squares: Squares, values: dict[int, float], fits: Callable[[Callable[[int], float]], float | None]
) -> Iterator[tuple[float, str]]:
    residual = fits(lambda rank: math.sqrt(sum(squares.by_rank.values())))
    if residual is not None:
        yield (
            residual,
            "It is the root of all ranks' squares, in which parameters that several ranks hold count several times",
        )
    copied = squares.of(lambda name: name in squares.copied)
    divided = squares.of(lambda name: name not in squares.copied)
    value = next(iter(values.values()))
    times = round((value**2 - divided) / copied) if copied and divided else 0
    if times > 1:
        residual = fits(lambda rank: math.sqrt(divided + times * copied))
        if residual is not None:
            yield residual, f"In it, the parameters that several ranks hold copies of are counted {times} times"


def _one_part_counts(
    squares: Squares, fits: Callable[[Callable[[int], float]], float | None]
) -> Iterator[tuple[float, str]]:
    """Of divided parameters only one rank's part counts, as of parameters that all ranks hold."""
    divided = [name for name in squares.by_name if name not in squares.copied]
    held = {name: [rank for rank, other in squares.by_part if other == name] for name in divided}
    divided = [name for name in divided if len(held[name]) > 1]
    ends = dict.fromkeys(name.rsplit(".", 1)[-1] for name in divided)
    groups = [[name for name in divided if name.rsplit(".", 1)[-1] == end] for end in ends]
    for names in (divided, *groups, *([name] for name in divided)):
        rest = squares.of(lambda name, left=names: name not in left)  # type: ignore[misc]
        for rank in sorted({rank for name in names for rank in held[name]}):
            counted = sum(squares.by_part.get((rank, name), 0.0) for name in names)
            residual = fits(lambda _, square=rest + counted: math.sqrt(square))  # type: ignore[misc]
            if residual is not None:
                yield (
                    residual,
                    f"In it, only the part that rank {rank} has of {list_names(names)} counts, as if each rank held all"
                    " of it: the parts of the other ranks are missing",
                )


def _constant(
    evidence: Evidence, squares: Squares, wrong: dict[int, Event], tolerance: float
) -> Iterator[tuple[float, str]]:
    factors = [float(event["value"]) / squares.norm for event in wrong.values()]
    if max(factors) / min(factors) - 1 > tolerance:
        return
    counts = [count for count in counts_of(evidence) if count.is_size]
    for factor, text in ((factors[0], "times"), (factors[0] ** 2, "times the root of")):
        known = recognize(factor, 2 * tolerance, counts)
        if known is not None:
            yield 0.5, f"It is the norm {text} {number(factor)}: {known.split(':')[0]}"
            return


def _reference_name(run: RecordedRun, rank: int, name: str) -> str:
    for record in run.ranks:
        if record.rank == rank:
            entry = record.header["parameters"].get(name) or {}
            return str(entry.get("reference_name") or name)
    return name
