"""Which samples form global batch k of epoch e: a function of the seed, the epoch and the sizes alone."""

from hashlib import blake2b

import numpy as np


def derive_seed(seed: int, *parts: int | str) -> int:
    """Returns a 63-bit seed, derived from `seed` for the use that `parts` names. It is the same in every process and on
    every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (int(seed), *parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def permutation(seed: int, epoch: int, size: int, part: int | None = None) -> np.ndarray:
    """Returns the order in which an epoch visits `size` samples, as an array of positions. If the data set is divided
    into parts, each part has an order of its own, and `part` is its number; otherwise `part` is None."""
    order_seed = derive_seed(seed, "order", epoch) if part is None else derive_seed(seed, "order", epoch, part)
    # numpy may change what its newer generators draw. RandomState is frozen, so a run resumes under any numpy.
    generator = np.random.RandomState([order_seed & 0xFFFFFFFF, order_seed >> 32])
    return generator.permutation(size).astype(np.int64, copy=False)


def batches_per_epoch(size: int, batch: int, drop_last: bool) -> int:
    return size // batch if drop_last else -(-size // batch)
