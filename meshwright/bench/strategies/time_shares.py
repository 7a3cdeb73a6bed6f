"""The shares of the ranks' time, from the moments that all ranks have recorded (`time_samples.py`).

computing      the rank computes, or starts operators
waiting        the rank is in an exchange while another rank still computes
bubble         the same in a pipeline, whose stages wait for each other
communicating  the rank is in an exchange, and no other rank computes
"""

from bisect import bisect
from collections.abc import Sequence

from meshwright.bench.strategies.time_samples import Sample

_LONGEST_GAP_S = 0.05  # a rank of which no moment so near is known counts as not computing


def time_shares(
    samples: Sequence[Sequence[Sample]], *, is_pipeline: bool, is_asynchronous: bool = False
) -> dict[str, float] | None:
    """Returns the mean shares over the ranks, in the time in which all of them recorded; None if they recorded
    nothing. Ranks that train asynchronously do not wait for each other."""
    if not samples or not all(samples):
        return None
    begin, end = max(rank[0][0] for rank in samples), min(rank[-1][0] for rank in samples)
    times = [[moment for moment, _ in rank] for rank in samples]
    counts = {"computing": 0, "communicating": 0, "waiting": 0, "bubble": 0}
    for number, rank in enumerate(samples):
        others = [other for other in range(len(samples)) if other != number and not is_asynchronous]
        for moment, is_exchange in rank:
            if not begin <= moment <= end:
                continue
            if not is_exchange:
                counts["computing"] += 1
            elif any(_computes(samples[other], times[other], moment) for other in others):
                counts["bubble" if is_pipeline else "waiting"] += 1
            else:
                counts["communicating"] += 1
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else None


def _computes(samples: Sequence[Sample], times: Sequence[float], moment: float) -> bool:
    """Whether a rank computed at this moment, by its nearest earlier sample."""
    index = bisect(times, moment) - 1
    return index >= 0 and moment - times[index] < _LONGEST_GAP_S and not samples[index][1]
