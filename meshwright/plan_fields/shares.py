"""Divides the samples of a batch among ranks in given proportions, into whole samples. Data loaders and predictions use
the same division. The module does not import torch.

    exact share of rank r    count · samples_r / Σ samples
    sizes                    exact shares rounded down; samples that are left over go to the ranks whose exact shares
                             have the largest fractions, to the lower rank where they are equal (`share_sizes`)
"""

from collections.abc import Sequence
from itertools import groupby
from math import gcd

_MOST_WORDS = 4  # groups of equal numbers that `describe_shares` lists


def share_sizes(count: int, samples: Sequence[int]) -> list[int]:
    """Returns how many of `count` samples each rank gets in the proportions of `samples`. The sum is `count`, and each
    size is the exact share rounded up or down. Equal proportions give the sizes of even shares."""
    total = sum(samples)
    sizes = [count * share // total for share in samples]
    largest_fractions = sorted(range(len(samples)), key=lambda rank: -(count * samples[rank] % total))
    for rank in largest_fractions[: count - sum(sizes)]:
        sizes[rank] += 1
    return sizes


def fewest_parts(samples: Sequence[int]) -> int:
    """The smallest number of equal parts of a data set of which every rank gets exactly its share."""
    return sum(samples) // gcd(*samples)


def describe_shares(samples: Sequence[int]) -> str:
    """The numbers in one line, such as `86, 42` or `48 × 8, 16 × 8`."""
    groups = [(share, len(list(equal))) for share, equal in groupby(samples)]
    if len(samples) > _MOST_WORDS:
        words = [f"{share} × {ranks}" if ranks > 1 else str(share) for share, ranks in groups]
    else:
        words = [str(share) for share in samples]
    if len(words) > 2 * _MOST_WORDS:
        words = [*words[:_MOST_WORDS], f"… ({min(samples)} to {max(samples)} on {len(samples)} ranks)"]
    return ", ".join(words)
