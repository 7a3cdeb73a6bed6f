"""Seeds the random generators that a model may draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from meshwright.data.randomness import preserve_generators


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within this context, the generators begin at `seed`. Afterwards they are as they were before, so that the random
    numbers of a training loop do not depend on what its sessions draw."""
    gpu_before = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with preserve_generators():
        seed_all(seed, device)
        try:
            yield
        finally:
            if gpu_before is not None:
                torch.cuda.set_rng_state(gpu_before, device)


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds the generators of torch, `random` and NumPy. It does not call `torch.manual_seed`, because that stores
    every call with its stack as long as CUDA is not initialized."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
