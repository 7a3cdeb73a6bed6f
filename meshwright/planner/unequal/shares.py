"""How many samples of a global batch each rank gets, so that the slowest rank is as fast as possible.

    t_g(s)     seconds that a rank of group g takes for s samples; rises with s                        ShareGroup
    l_g        the most samples that fit into the memory of such a rank                                best_shares
    shares     whole s_g with fewest ≤ s_g ≤ l_g and Σ ranks_g · s_g ≥ total, for which max t_g(s_g) is smallest

The search begins with shares for which straight lines through two points of each t_g are equally long (`_guess`). As
long as every group can take a number of samples in less than the longest time, and these samples are enough together,
the shares are replaced by fewer (`_fastest`): when that ends, no other shares are faster. Samples that are too many are
taken from ranks of the slowest groups (`_spread`), so that shares of equal ranks differ by at most one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

_ROUNDS = 60  # halvings of the time for which straight lines have enough samples


@dataclass
class ShareGroup:
    """Ranks that are alike. `step_s` returns the seconds of one of them for a number of samples, and `fits` whether it
    has the memory for them."""

    ranks: int
    step_s: Callable[[int], float]
    fits: Callable[[int], bool]
    _known: dict[int, float] = field(default_factory=dict)

    def seconds(self, samples: int) -> float:
        if samples not in self._known:
            self._known[samples] = self.step_s(samples)
        return self._known[samples]


def best_shares(
    total: int, groups: Sequence[ShareGroup], fewest: int = 1, near: Sequence[int] = ()
) -> list[list[int]] | None:
    """The samples of each rank, by group; at least `fewest` for each. None if there are not enough, or if they do not
    fit. `near` are shares by group that are probably almost the best."""
    ranks = sum(group.ranks for group in groups)
    limits = [total - (ranks - 1) * fewest] * len(groups)
    while True:
        shares = _fastest(total, groups, limits, fewest, near)
        if shares is None:
            return None
        too_many = [index for index, group in enumerate(groups) if not group.fits(shares[index])]
        if not too_many:
            return _spread(total, groups, shares, fewest)
        for index in too_many:
            limits[index] = _largest(groups[index].fits, shares[index])


def _fastest(
    total: int, groups: Sequence[ShareGroup], limits: Sequence[int], fewest: int, near: Sequence[int]
) -> list[int] | None:
    """The most samples that a rank of each group gets, with which the slowest is as fast as possible."""
    most = sum(group.ranks * limit for group, limit in zip(groups, limits, strict=True))
    if min(limits) < fewest or most < total:
        return None
    shares = _guess(total, groups, limits, fewest, near)
    while True:
        longest_s = max(group.seconds(share) for group, share in zip(groups, shares, strict=True))
        faster = [
            _largest_below(group, share, limit, longest_s)
            for group, share, limit in zip(groups, shares, limits, strict=True)
        ]
        if (
            min(faster) < fewest
            or sum(group.ranks * share for group, share in zip(groups, faster, strict=True)) < total
        ):
            return shares
        shares = _without_surplus(total, groups, faster, fewest)


def _guess(
    total: int, groups: Sequence[ShareGroup], limits: Sequence[int], fewest: int, near: Sequence[int]
) -> list[int]:
    """Shares that are enough, and with which all ranks would take equally long if seconds rose along straight lines.
    Unless there are shares `near` the best, the first lines lead to such shares, and the second lines pass near
    them."""
    if not near:
        even = max(1, total // sum(group.ranks for group in groups))
        points = [(min(even, limit), min(2 * even, limit)) for limit in limits]
        lines = [_line(*item) for item in zip(groups, points, strict=True)]
        near = _equally_long(total, groups, limits, fewest, lines)
    near = [min(share, limit) for share, limit in zip(near, limits, strict=True)]
    lines = [_line(group, (max(1, share * 7 // 8), share)) for group, share in zip(groups, near, strict=True)]
    return _equally_long(total, groups, limits, fewest, lines)


def _line(group: ShareGroup, points: tuple[int, int]) -> tuple[float, float]:
    """Seconds for no samples, and for each sample."""
    first, second = points
    if second == first:
        return 0.0, group.seconds(first) / first
    slope = max(1e-12, (group.seconds(second) - group.seconds(first)) / (second - first))
    return group.seconds(first) - slope * first, slope


def _equally_long(
    total: int, groups: Sequence[ShareGroup], limits: Sequence[int], fewest: int, lines: Sequence[tuple[float, float]]
) -> list[int]:
    def shares_in(seconds: float) -> list[int]:
        return [
            max(fewest, min(limit, int((seconds - start) / slope)))
            for limit, (start, slope) in zip(limits, lines, strict=True)
        ]

    def are_enough(shares: Sequence[int]) -> bool:
        return sum(group.ranks * share for group, share in zip(groups, shares, strict=True)) >= total

    low, high = 0.0, max(start + slope * limit for limit, (start, slope) in zip(limits, lines, strict=True)) * 1.01
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if are_enough(shares_in(middle)) else (middle, high)
    return shares_in(high)


def _largest(holds: Callable[[int], bool], too_many: int) -> int:
    """The largest number of samples below `too_many` for which `holds` is True, if it is for all smaller ones; or 0."""
    low, high = 0, too_many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _largest_below(group: ShareGroup, share: int, limit: int, longest_s: float) -> int:
    """The most samples, at most `limit`, for which a rank takes less than `longest_s`; 0 if there are none. The search
    goes from `share` in steps that double."""
    if group.seconds(share) < longest_s:
        for power in count():
            next_share = min(limit, share + 2**power)
            if next_share == limit and group.seconds(limit) < longest_s:
                return limit
            if group.seconds(next_share) >= longest_s:
                break
        low, high = share, next_share
    else:
        for power in count():
            low = max(0, share - 2**power)
            if low == 0 or group.seconds(low) < longest_s:
                break
        high = share
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if group.seconds(middle) < longest_s else (low, middle)
    return low


def _without_surplus(total: int, groups: Sequence[ShareGroup], shares: Sequence[int], fewest: int) -> list[int]:
    """The shares without the samples of which there are too many for all ranks of the slowest group."""
    left = list(shares)
    surplus = sum(group.ranks * share for group, share in zip(groups, left, strict=True)) - total
    while True:
        slowest = max(range(len(groups)), key=lambda index: groups[index].seconds(left[index]))
        if groups[slowest].ranks > surplus or left[slowest] == fewest:
            return left
        left[slowest] -= 1
        surplus -= groups[slowest].ranks


def _spread(total: int, groups: Sequence[ShareGroup], shares: Sequence[int], fewest: int) -> list[list[int]]:
    """The samples of each rank. Those that are too many are taken from the last ranks of the slowest groups."""
    samples = [[share] * group.ranks for group, share in zip(groups, shares, strict=True)]
    surplus = sum(map(sum, samples)) - total
    while surplus:
        slowest = sorted(range(len(groups)), key=lambda index: -groups[index].seconds(samples[index][0]))
        group = next(index for index in slowest if samples[index][0] > fewest)
        fewer = min(surplus, len(samples[group]))
        for rank in range(len(samples[group]) - fewer, len(samples[group])):
            samples[group][rank] -= 1
        surplus -= fewer
    return samples
