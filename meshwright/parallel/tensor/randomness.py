"""Chance on parts: what is drawn for a part differs from rank to rank, and the ranks' generators stay in step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.data.order import derive


@contextmanager
def own_chance(rank: int, device: torch.device) -> Iterator[None]:
    """While it lasts, the default generator is this rank's own, made of one number that all ranks draw alike."""
    seed = int(torch.randint(2**62, ()))  # on the CPU: nobody waits for the device
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    before = generator.get_state()
    generator.manual_seed(derive(seed, "part", rank))
    try:
        yield
    finally:
        generator.set_state(before)
