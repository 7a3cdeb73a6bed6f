"""Intervals of time, such as those in which a device was busy."""

from collections.abc import Iterable

Interval = tuple[float, float]  # begin and end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the intervals in their order, with those that overlap or touch joined."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Returns the sum of the lengths of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)
