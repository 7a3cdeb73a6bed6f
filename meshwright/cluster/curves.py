"""How long a collective takes on a link, read off its measured curves.

Between two measured sizes the time follows a straight line in log(bytes) and log(seconds); below the smallest it falls
in proportion towards the link's latency, above the largest it grows in proportion, which is a constant bandwidth.
Between two measured numbers of ranks, the same straight line in log(ranks). Outside of those there is no answer.

The size is that of the whole tensor: what every rank has after an all-gather or before a reduce-scatter, what one
rank sends in all in an all-to-all, the message otherwise.
"""

from collections.abc import Iterable
from math import exp, log

from meshwright.cluster.cluster import Collective, Curve, Link


def curve_time(link: Link, collective: Collective, size_bytes: float, ranks: int, nodes: int = 1) -> float | None:
    """Seconds, or None where no measured curve speaks for so many ranks on so many nodes.

    Over several nodes only curves with as many ranks a node speak: eight ranks behind one network card are not one.
    """
    around = _around(link, collective, ranks, nodes)
    if around is None:
        return None
    fewer, more = around
    start = _time(fewer, size_bytes, link.latency_s)
    if fewer.ranks == more.ranks:
        return start
    return _between(ranks, (fewer.ranks, start), (more.ranks, _time(more, size_bytes, link.latency_s)))


def measured_from(link: Link, collective: Collective, ranks: int, nodes: int = 1) -> int | None:
    """The smallest size that `curve_time` answers from measurements alone."""
    around = _around(link, collective, ranks, nodes)
    return None if around is None else max(curve.points[0][0] for curve in around)


def rising(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Measured points as a curve wants them: a smaller message never takes longer than a larger one was seen to."""
    kept: list[tuple[int, float]] = []
    for size, seconds in sorted(points, reverse=True):
        kept.append((size, min(seconds, kept[-1][1]) if kept else seconds))
    return tuple(reversed(kept))


def _around(link: Link, collective: Collective, ranks: int, nodes: int) -> tuple[Curve, Curve] | None:
    """The measured curves for the next fewer and the next more ranks; twice the same where one fits."""
    curves = sorted(_alike(link.curves.get(collective, ()), ranks, nodes), key=lambda curve: curve.ranks)
    below = [curve for curve in curves if curve.ranks <= ranks]
    above = [curve for curve in curves if curve.ranks >= ranks]
    return (below[-1], above[0]) if below and above else None


def _alike(curves: Iterable[Curve], ranks: int, nodes: int) -> list[Curve]:
    if nodes == 1:
        return [curve for curve in curves if curve.nodes == 1]
    return [curve for curve in curves if curve.nodes > 1 and curve.ranks * nodes == ranks * curve.nodes]


def _time(curve: Curve, size_bytes: float, latency_s: float) -> float:
    points = curve.points
    first, last = points[0], points[-1]
    if size_bytes <= first[0]:
        floor = min(latency_s, first[1])
        return floor + (first[1] - floor) * size_bytes / first[0]
    if size_bytes >= last[0]:
        return last[1] * size_bytes / last[0]
    index = next(index for index, (size, _) in enumerate(points) if size >= size_bytes)
    return _between(size_bytes, points[index - 1], points[index])


def _between(x: float, start: tuple[float, float], end: tuple[float, float]) -> float:
    share = log(x / start[0]) / log(end[0] / start[0])
    if share >= 1:  # through the measured point itself, not within rounding of it
        return end[1]
    return start[1] * exp(share * log(end[1] / start[1]))
