"""Random numbers on shards: dropout must differ from rank to rank while the ranks' generators stay in one state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.data.order import derive_seed


@contextmanager
def rank_seeded_generator(rank: int, device: torch.device) -> Iterator[None]:
    """Inside, the device's default generator is seeded for this rank; afterwards it is as before.

    The seed comes from one number that every rank draws alike from the CPU's generator, so that all ranks leave in the
    same state.
    """
    seed = int(torch.randint(2**62, ()))  # on the CPU, so that nothing waits for the device
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    state = generator.get_state()
    generator.manual_seed(derive_seed(seed, "part", rank))
    try:
        yield
    finally:
        generator.set_state(state)
