"""The local search around points.

fastest_of   with given axes: for each schedule and level of recomputation the largest microbatches that fit, found by
             their memory, and of these and smaller ones the fastest
descend      from a point to its fastest neighbour that fits, until no neighbour is faster
simplified   from a point to simpler ones that are slower by no more than preference.py accepts
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.bounds import Bounds
from meshwright.planner.candidates import Candidate
from meshwright.planner.polish.neighbours import Neighbours, chunk_counts, with_fields
from meshwright.planner.polish.point import NEVER_S, Point, Prices
from meshwright.planner.preference import is_acceptable, simplicity
from meshwright.planner.search_result import PricedPlan

Bounded = list[tuple[Candidate, Bounds]]
_MOST_SERIES = 3
_MOST_TIMED = 4  # candidates of one schedule and level of recomputation of which the step is predicted
_MOST_ROUNDS = 6
_FASTER = 1 - 1e-9


@dataclass
class Descent:
    """Searches with the predictions of `prices` among the points of `neighbours`. `uses_bounds` says whether candidates
    whose lower bound of time is longer than a known step are left out."""

    prices: Prices
    neighbours: Neighbours
    uses_bounds: bool = True

    def fastest_of(self, bounded: Bounded, limit_s: float = NEVER_S) -> Point | None:
        """The fastest point of these candidates, which have equal axes; None if none fits, or if none is faster than
        the limit. Of the schedules and levels of recomputation, those with the fastest guess are searched, until
        `_MOST_SERIES` have a point."""
        best: Point | None = None
        found = 0
        for series in _series(bounded):
            least_s = limit_s if best is None else min(limit_s, self.prices.seconds(best))
            if found >= _MOST_SERIES or (self.uses_bounds and min(b.floor_s for _, b in series) >= least_s):
                continue
            for point in self._fastest_of_series(series):
                found += 1
                if best is None or self.prices.seconds(point) < self.prices.seconds(best) * _FASTER:
                    best = point
        return best

    def _fastest_of_series(self, series: Bounded) -> Iterator[Point]:
        points = [self.neighbours.usual(candidate) for candidate, _ in series]
        points = [point for point in points if self.prices.seconds(point) < NEVER_S] if len(points) == 1 else points
        index = self._largest_fitting(points)
        if index is None:
            if in_chunks := self._fitting_in_chunks(points):
                yield in_chunks
            return
        guesses = {point: bound.guess_s for point, (_, bound) in zip(points, series, strict=False)}
        timed = sorted(points[: index + 1], key=lambda point: guesses[point])[:_MOST_TIMED]
        if points[index] not in timed:
            timed.append(points[index])
        for point in sorted(timed, key=self.prices.seconds):
            if self.prices.seconds(point) < NEVER_S and self.prices.fits(point):
                yield point
                return

    def _largest_fitting(self, points: Sequence[Point]) -> int | None:
        """The index of the point with the largest microbatches that fits; None if none does. Microbatches grow along
        the points, and memory almost in proportion, so that two predictions say where to look."""
        if not points or not self.prices.fits(points[0]):
            return None
        low, high = 0, len(points) - 1
        if high == 0 or self.prices.fits(points[high]):
            return high
        while high - low > 1:
            middle = self._between(points, low, high)
            low, high = (middle, high) if self.prices.fits(points[middle]) else (low, middle)
        return low

    def _between(self, points: Sequence[Point], low: int, high: int) -> int:
        priced = [self.prices.priced.get(points[index]) for index in (low, high)]
        capacity = self.prices.inputs.capacity_bytes
        small, large = (float(p.needed_bytes) if p is not None else 0.0 for p in priced)
        first, last = (points[index].candidate.microbatch_samples for index in (low, high))
        if not small < capacity < large:
            return (low + high) // 2
        samples = first + (last - first) * (capacity - small) / (large - small)
        at_most = [i for i in range(low, high + 1) if points[i].candidate.microbatch_samples <= samples]
        return min(max(at_most[-1] if at_most else low, low + 1), high - 1)

    def _fitting_in_chunks(self, points: Sequence[Point]) -> Point | None:
        """The point with the smallest microbatches with a loss in the fewest chunks with which it fits."""
        if not points or self.prices.inputs.allow == "same":
            return None
        point, traits = points[0], self.neighbours.traits
        sizes = point.candidate.sizes
        if not traits.loss_tokens or sizes.tensor > 1 or sizes.pipeline > 1 or sizes.splits_wide_layers:
            return None
        for count in chunk_counts(point.candidate, traits):
            chunked = replace(point, compute=with_fields(point.compute, {"loss_chunks": count}))
            if self.prices.fits(chunked):
                return chunked
        return None

    def descend(self, point: Point, *, within: bool = False) -> Point:
        """The point from which no neighbour is faster; with `within`, no neighbour with the same axes."""
        for _ in range(_MOST_ROUNDS):
            before = point
            for group in self.neighbours.groups(point, within=within):
                point = self._best_in(group, point)
            if point == before:
                break
        return point

    def _best_in(self, group: Callable[[Point], Iterator[Point]], point: Point) -> Point:
        """Follows the neighbours in some fields as long as one is faster and fits."""
        seconds = self.prices.seconds
        seen = {point}
        while True:
            near = [other for other in dict.fromkeys(group(point)) if other not in seen]
            seen.update(near)
            limit = seconds(point) * _FASTER
            faster = sorted((other for other in near if seconds(other) < limit), key=seconds)
            following = next((other for other in faster if self.prices.fits(other)), None)
            if following is None:
                return point
            point = following
            self.prices.divide(point)

    def simplified(self, point: Point) -> Point:
        """The simplest point that a few of its fields lead to and that is accepted in place of this one."""
        fastest, best = self.prices.price(point), point
        assert fastest is not None
        for other in (*self._simpler_candidates(point), *_simpler(point)):
            for base in (best, point):
                changed = other(base)
                if changed != best and self._is_accepted(changed, best, fastest):
                    best = changed
                    break
        return best

    def _simpler_candidates(self, point: Point) -> list[Any]:
        """Functions that give a point less recomputation and a single microbatch."""
        candidate, with_samples = point.candidate, self.neighbours.with_samples
        options = [with_samples(candidate, 0, recompute="none")] if candidate.recompute != "none" else []
        if candidate.sizes.pipeline == 1 and candidate.microbatches > 1:
            options += self.neighbours.like(candidate)[-1:]
        return [lambda p, other=other: replace(p, candidate=other) for other in options if other is not None]

    def _is_accepted(self, point: Point, best: Point, fastest: PricedPlan) -> bool:
        limit = 1.1 * fastest.prediction.step_s
        if self.prices.seconds(point) > limit or not self.prices.fits(point):
            return False
        priced, known = self.prices.price(point), self.prices.price(best)
        assert priced is not None
        assert known is not None
        simple, before = simplicity(priced.plan), simplicity(known.plan)
        gains_nothing = simple == before and priced.prediction.step_s <= known.prediction.step_s
        is_simpler = simple < before or (gains_nothing and len(point.compute) < len(best.compute))
        return is_simpler and is_acceptable(priced.prediction, fastest.prediction)


def _series(bounded: Bounded) -> list[Bounded]:
    """The candidates by schedule and recomputation, each list with growing microbatches; those with the fastest guess
    first."""
    grouped: dict[tuple[Any, ...], Bounded] = {}
    for item in bounded:
        grouped.setdefault(item[0].without_microbatch, []).append(item)
    series = [sorted(items, key=lambda item: item[0].microbatch_samples) for items in grouped.values()]
    return sorted(series, key=lambda items: min(bound.guess_s for _, bound in items))


def _simpler(point: Point) -> list[Any]:
    """Functions that set one field of a point to its default."""
    changes: list[Any] = [
        lambda p, name=name: replace(p, compute=tuple(item for item in p.compute if item[0] != name))
        for name, _ in sorted(point.compute, key=lambda item: item[0] != "loss_chunks")
    ]
    compiled = dict(point.compute).get("compile")
    if compiled:
        eager = {"compile": "none", "cuda_graphs": False}
        changes.append(lambda p: replace(p, compute=with_fields(p.compute, eager)))
        changes.append(lambda p: replace(p, compute=with_fields(p.compute, {"compile": "blocks"})))
    defaults = Point(point.candidate)
    changes += [
        lambda p, name=name: replace(p, **{name: getattr(defaults, name)})
        for name in ("cast", "bucket_bytes", "offload")
    ]
    return changes
