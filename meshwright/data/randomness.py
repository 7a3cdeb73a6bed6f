"""How augmentation stays a function of (seed, epoch, sample): the generators that data sets draw from are
seeded for each sample, and given back to the rank as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info

from meshwright.data.order import derive


def seed_generators(seed: int, *parts: int | str) -> None:
    """Seeds Python's, numpy's legacy and torch's CPU generator; never a GPU's, which belongs to the model."""
    own = derive(seed, *parts)
    random.seed(own)
    np.random.seed(own & 0xFFFFFFFF)
    torch.default_generator.manual_seed(own)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves a rank's generators as they were. A worker process has nothing to keep, so nothing is saved."""
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
