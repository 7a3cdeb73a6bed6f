"""Random numbers on shards: dropout must differ from rank to rank while the ranks' generators stay in one state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.data.order import derive_seed


def call_with_rank_seed(function: Callable[..., Any], rank: int, *args: Any) -> Any:
    """Calls the function, which draws random numbers, with these local tensors and other arguments, such that ranks
    draw different numbers."""
    tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
    if has_torch_function(tensors):  # a mode that records functions (local_graph.py)
        return handle_torch_function(call_with_rank_seed, tensors, function, rank, *args)
    with rank_seeded_generator(rank, tensors[0].device):
        return function(*args)


@contextmanager
def rank_seeded_generator(rank: int, device: torch.device) -> Iterator[None]:
    """A context in which the device's default generator has a seed of this rank. Its state is restored at the end.

    The seed is derived from the rank and from a number drawn from the CPU's generator. All ranks draw this number, and
    their generators therefore stay in the same state.
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
