"""`WeightedSampling`: draws the samples of an epoch by weights. What is drawn is a function of the seed, the epoch and
the weights alone, so it is the same under every plan, on any number of ranks and after a restart."""

from dataclasses import dataclass

import numpy as np

from meshwright.data.order import derive_seed
from meshwright.errors import InputError


@dataclass(frozen=True, eq=False)
class WeightedSampling:
    """How an epoch draws its samples: `draws` of them, each with a probability that is proportional to its weight. With
    `replacement`, the same sample can be drawn several times in an epoch. `weights` has one entry for each sample of
    the data set. Raises an `InputError` if nothing can be drawn by these weights."""

    weights: np.ndarray
    draws: int
    replacement: bool = True

    def __post_init__(self) -> None:
        weights = self.weights
        if weights.ndim != 1:
            raise InputError(f"data.weights have the shape {weights.shape}: give one number for each sample")
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(wrong):
            raise InputError(
                f"the weight of sample {wrong[0]} is {weights[wrong[0]]}: weights have to be finite and not negative"
            )
        drawable = int(np.count_nonzero(weights))
        if not drawable or not np.isfinite(weights.sum()):
            raise InputError(f"the weights of the {len(weights)} samples add up to {weights.sum()}: nothing is drawn")
        if not self.replacement and self.draws > drawable:
            raise InputError(
                f"an epoch draws {self.draws} samples without replacement, but only {drawable} samples have a weight"
                " above 0: draw fewer, or draw with replacement"
            )

    def check_size(self, size: int) -> None:
        """Raises an `InputError` if the data set has another number of samples than there are weights."""
        if len(self.weights) != size:
            raise InputError(
                f"there are {len(self.weights)} weights for the {size} samples of the training set: give one for each"
            )

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the indices of the samples that an epoch draws, in the order in which they were drawn."""
        order_seed = derive_seed(seed, "weighted order", epoch)
        # RandomState never changes what it draws, see `permutation` in order.py.
        generator = np.random.RandomState([order_seed & 0xFFFFFFFF, order_seed >> 32])
        if self.replacement:
            return self._draw_with_replacement(generator)
        # An exponential variable divided by its weight is the time at which a sample is drawn: samples that are ordered
        # by these times are drawn without replacement, in proportion to the weights that are left.
        drawable = np.flatnonzero(self.weights)
        times = generator.exponential(size=len(drawable)) / self.weights[drawable]
        return drawable[np.argsort(times, kind="stable")[: self.draws]].astype(np.int64, copy=False)

    def _draw_with_replacement(self, generator: np.random.RandomState) -> np.ndarray:
        ends = np.cumsum(self.weights)
        positions = generator.random_sample(self.draws) * ends[-1]
        indices = np.searchsorted(ends, positions, side="right")
        # A position that is rounded up to the sum of all weights belongs to the last sample that has a weight.
        return np.minimum(indices, np.flatnonzero(self.weights)[-1]).astype(np.int64, copy=False)


def repeat_numbers(order: np.ndarray) -> np.ndarray:
    """Returns, for each position of an order, how often its sample appears before: 0 for the first time."""
    by_sample = np.argsort(order, kind="stable")
    is_first = np.diff(order[by_sample], prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    repeats = np.empty(len(order), np.int64)
    repeats[by_sample] = np.arange(len(order)) - starts
    return repeats
