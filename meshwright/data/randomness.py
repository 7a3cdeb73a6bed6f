"""Makes random augmentation a function of (seed, epoch, sample). The generators that data sets draw from are seeded for
each sample, and afterwards restored to the state that they had in the rank."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info

from meshwright.data.order import derive_seed


def seed_generators(seed: int, *parts: int | str) -> None:
    """Seeds the generators of Python, of numpy's `np.random` functions and of torch on the CPU. The generators of GPUs
    are left alone, because they belong to the model."""
    derived = derive_seed(seed, *parts)
    random.seed(derived)
    np.random.seed(derived & 0xFFFFFFFF)
    torch.default_generator.manual_seed(derived)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores a rank's generators at the end of the context. In a worker process it does nothing, because only data
    sets draw random numbers there."""
    if get_worker_info() is not None:
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
