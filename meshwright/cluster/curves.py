"""Interpolates how long a collective takes on a link from the link's measured curves.

    between two measured sizes      a straight line in log(bytes) and log(seconds)              _interpolated
    below the smallest size         a straight line in bytes down to the link's latency         _curve_seconds
    above the largest size          seconds in proportion to bytes: a constant bandwidth        _curve_seconds
    between two numbers of ranks    a straight line in log(ranks) and log(seconds)              curve_time
    fewer or more ranks             no answer                                                   _neighbouring_curves

The size is that of the whole tensor: what every rank has after an all-gather or before a reduce-scatter, all that one
rank sends in an all-to-all, and the message otherwise.
"""

from collections.abc import Iterable
from math import exp, log

from meshwright.cluster.cluster import Collective, Curve, Link


def curve_time(link: Link, collective: Collective, size_bytes: float, ranks: int, nodes: int = 1) -> float | None:
    """Returns seconds, or None where the measured curves do not cover this number of ranks and nodes.

    For several nodes only curves with the same number of ranks per node are used, because the ranks of a node share its
    network card.
    """
    curves = _neighbouring_curves(link, collective, ranks, nodes)
    if curves is None:
        return None
    fewer, more = curves
    fewer_s = _curve_seconds(fewer, size_bytes, link.latency_s)
    if fewer.ranks == more.ranks:
        return fewer_s
    return _interpolated(ranks, (fewer.ranks, fewer_s), (more.ranks, _curve_seconds(more, size_bytes, link.latency_s)))


def smallest_measured_bytes(link: Link, collective: Collective, ranks: int, nodes: int = 1) -> int | None:
    """Returns the smallest size for which `curve_time` interpolates between measured points; None where `curve_time`
    returns None."""
    curves = _neighbouring_curves(link, collective, ranks, nodes)
    return None if curves is None else max(curve.points[0][0] for curve in curves)


def rising(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Returns the points in order of size, with times lowered so that no message takes longer than a larger one."""
    descending: list[tuple[int, float]] = []
    for size, seconds in sorted(points, reverse=True):
        descending.append((size, min(seconds, descending[-1][1]) if descending else seconds))
    return tuple(reversed(descending))


def _neighbouring_curves(link: Link, collective: Collective, ranks: int, nodes: int) -> tuple[Curve, Curve] | None:
    """Returns the curve with the next smaller and the curve with the next larger number of ranks. If a curve has
    exactly this number, it is returned twice. None if every curve has fewer ranks, or every curve has more."""
    curves = sorted(_comparable(link.curves.get(collective, ()), ranks, nodes), key=lambda curve: curve.ranks)
    below = [curve for curve in curves if curve.ranks <= ranks]
    above = [curve for curve in curves if curve.ranks >= ranks]
    return (below[-1], above[0]) if below and above else None


def _comparable(curves: Iterable[Curve], ranks: int, nodes: int) -> list[Curve]:
    """Returns the curves that were measured on one node or, if `nodes` is above 1, those that were measured on several
    nodes with the same number of ranks per node."""
    if nodes == 1:
        return [curve for curve in curves if curve.nodes == 1]
    return [curve for curve in curves if curve.nodes > 1 and curve.ranks * nodes == ranks * curve.nodes]


def _curve_seconds(curve: Curve, size_bytes: float, latency_s: float) -> float:
    points = curve.points
    first, last = points[0], points[-1]
    if size_bytes <= first[0]:
        floor = min(latency_s, first[1])
        return floor + (first[1] - floor) * size_bytes / first[0]
    if size_bytes >= last[0]:
        return last[1] * size_bytes / last[0]
    index = next(index for index, (size, _) in enumerate(points) if size >= size_bytes)
    return _interpolated(size_bytes, points[index - 1], points[index])


def _interpolated(x: float, start: tuple[float, float], end: tuple[float, float]) -> float:
    """Returns y at `x` on the straight line in log(x) and log(y) through two points (x, y)."""
    share = log(x / start[0]) / log(end[0] / start[0])
    if share >= 1:  # exactly the measured value, without rounding error
        return end[1]
    return start[1] * exp(share * log(end[1] / start[1]))
