"""Which samples form global batch k of epoch e: a function of the seed, the epoch and the sizes alone."""

from hashlib import blake2b

import numpy as np


def derive(seed: int, *parts: int | str) -> int:
    """A 63-bit seed of its own for each use of `seed`; the same in every process and on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (int(seed), *parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def permutation(seed: int, epoch: int, size: int, part: int | None = None) -> np.ndarray:
    """The order in which an epoch visits the samples, or those of a part of them."""
    own = derive(seed, "order", epoch) if part is None else derive(seed, "order", epoch, part)
    # numpy may change what its new generators draw; this one is frozen, so a run resumes under any numpy.
    generator = np.random.RandomState([own & 0xFFFFFFFF, own >> 32])
    return generator.permutation(size).astype(np.int64, copy=False)


def batches_per_epoch(size: int, batch: int, drop_last: bool) -> int:
    return size // batch if drop_last else -(-size // batch)
