"""What a rank allocates while its queries attend is what the prediction of its memory states: for several numbers of
heads, lengths and dtypes, with both exchanges."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.parallel.context.attention import AttentionCall, attend_over_ranks
from meshwright.parallel.context.exchange import Exchange
from meshwright.parallel.context.sequence_view import balanced_tokens
from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.simulator.context import exchange_bytes
from tests.parallel.context.test_attention import context_group
from tests.ranks import RankPool
from tests.soaked import all_but


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators allocate within this mode. `peak` is the most bytes of them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._follow(leaf, is_new=False)
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            self._follow(leaf, is_new=True)
        return results

    def _follow(self, leaf: Any, is_new: bool) -> None:
        storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
        if storage is None or id(storage) in self._storages:
            return
        key, size = id(storage), storage.nbytes() if is_new else 0
        self._now += size
        self.peak = max(self.peak, self._now)

        def release(_: Any) -> None:
            self._now -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, release)


def peaks(
    rank: int,
    group: AxisGroup,
    exchange: Exchange,
    causal: bool,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    length: int,
) -> tuple[float, float]:
    """The most bytes that the forward and the backward pass allocate, as multiples of the bytes of the rank's keys and
    values."""
    tokens, width = balanced_tokens(length, group.size), 32
    local = sum(count for _, count in tokens[rank])
    query, key, value = (
        torch.randn(1, number, local, width, dtype=dtype, requires_grad=True) for number in (heads, kv_heads, kv_heads)
    )
    call = AttentionCall(tokens[rank], tokens, group, exchange, 0.1, causal, None)
    with LiveBytes() as forward:
        output = attend_over_ranks(query, key, value, None, call)
    gradient = torch.randn_like(output)
    with LiveBytes() as backward:
        output.backward(gradient)
    unit = 2 * key.numel() * key.element_size()
    return forward.peak / unit, backward.peak / unit


CASES: dict[str, tuple[bool, int, int, torch.dtype, int]] = {  # causal, heads, key-value heads, dtype, length
    "causal": (True, 4, 4, torch.float32, 1_024),
    "full": (False, 4, 4, torch.float32, 1_024),
    "grouped heads": (True, 8, 2, torch.float32, 1_024),
    "grouped heads in bf16": (True, 8, 2, torch.bfloat16, 768),
    "full, in bf16": (False, 4, 4, torch.bfloat16, 1_280),
}


def peaks_of_case(rank: int, size: int, name: str) -> dict[Exchange, tuple[float, float]]:
    exchanges: tuple[Exchange, Exchange] = ("all_gather", "ring")
    group = context_group(size)
    return {exchange: peaks(rank, group, exchange, *CASES[name]) for exchange in exchanges}


# CPUs without instructions for bf16 take long for it.
@pytest.mark.parametrize("name", all_but({name for name in CASES if "bf16" not in name}, CASES))
def test_ranks_allocate_what_is_stated(four: RankPool, name: str) -> None:
    """The rank with the longest tiles needs most, and every rank less in the forward pass."""
    of_ranks = four.run(peaks_of_case, name)
    _, heads, kv_heads, dtype, _ = CASES[name]
    for exchange in of_ranks[0]:
        forward, backward = (max(of_rank[exchange][number] for of_rank in of_ranks) for number in (0, 1))
        stated = exchange_bytes(1.0, 4 / dtype.itemsize, heads / kv_heads, 4, exchange == "ring", backward=True)
        assert stated == pytest.approx(backward, rel=0.1), exchange
        assert forward < backward
