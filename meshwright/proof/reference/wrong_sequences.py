"""Mistakes that ranks of the context axis can make with a divided sequence, made on one device.

Within one of these modes a forward pass and its loss are computed as if the ranks had made the mistake. The length of
the sequences is that of the first lookup in an embedding table; how a length is divided, `balanced_tokens` says.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.parallel.context.sequence_view import balanced_tokens
from meshwright.parallel.tensor.dispatch import python_implementation


class WrongSequence(TorchFunctionMode):
    """Runs all functions as they are. `ranks` is the size of the context axis."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.length = 0

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.embedding and not self.length and args[1].dim() > 1:
            self.length = args[1].shape[-1]
        if self.length:
            changed = self.change(func, args, kwargs)
            if changed is not NotImplemented:
                return changed
        if isinstance(func, types.FunctionType) and "__class__" not in func.__code__.co_freevars:
            with self:  # the functions that torch's own Python code calls come here, too
                return python_implementation(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def change(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the wrong result of a function; NotImplemented where it is right."""
        return NotImplemented

    @property
    def rank_of_token(self) -> Tensor:
        """The rank that has each position."""
        ranks = torch.zeros(self.length, dtype=torch.int64)
        for rank, ranges in enumerate(balanced_tokens(self.length, self.ranks)):
            for first, count in ranges:
                ranks[first : first + count] = rank
        return ranks


class OwnPastOnly(WrongSequence):
    """Queries attend to keys of their own rank only."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys each query attends to, of those that it should attend to."""
        ranks = self.rank_of_token
        return ranks[queries][:, None] == ranks[keys]

    def change(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is not F.scaled_dot_product_attention:
            return NotImplemented
        options = (
            dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        )
        query, key = options["query"], options["key"]
        if not query.shape[-2] == key.shape[-2] == self.length:
            return NotImplemented
        positions = torch.arange(self.length)
        allowed = self.allowed(positions, positions).to(query.device)
        if options.pop("is_causal", False):
            allowed = self.causal(allowed)
        mask = options.pop("attn_mask", None)
        if mask is None:
            mask = allowed
        else:
            mask = mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)
        return func(**options, attn_mask=mask)

    def causal(self, allowed: Tensor) -> Tensor:
        return allowed.tril()


class FutureOfOtherRanks(OwnPastOnly):
    """Queries of causal attention also attend to later keys, if another rank has them."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones(self.length, self.length, dtype=torch.bool)

    def causal(self, allowed: Tensor) -> Tensor:
        ranks = self.rank_of_token.to(allowed.device)
        return allowed.tril() | (ranks[:, None] != ranks)


class LocalPositions(WrongSequence):
    """Each rank numbers its tokens from 0, instead of by their positions in the whole sequence. Positions are made by
    `torch.arange`, or are the first rows of a table."""

    def change(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.arange and args[:1] == (self.length,) and len(args) == 1:
            return func(*args, **kwargs)[self._local_positions(kwargs.get("device"))]
        is_slice = func is torch.Tensor.__getitem__ and isinstance(args[1], slice)
        if not is_slice or not isinstance(args[0], nn.Parameter):
            return NotImplemented
        is_beginning = args[1].indices(args[0].shape[0]) == (0, self.length, 1)
        return func(args[0], self._local_positions(args[0].device)) if is_beginning else NotImplemented

    def _local_positions(self, device: Any) -> Tensor:
        positions = torch.zeros(self.length, dtype=torch.int64)
        for ranges in balanced_tokens(self.length, self.ranks):
            begin = 0
            for first, count in ranges:
                positions[first : first + count] = torch.arange(begin, begin + count)
                begin += count
        return positions.to(device)


class LostTargets(WrongSequence):
    """The last token of each piece of a sequence, whose target is the first token of the next piece, has no target."""

    def change(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is not F.cross_entropy or len(args) < 2 or args[1].is_floating_point() or args[1].numel() % self.length:
            return NotImplemented
        ends = [first + count - 1 for ranges in balanced_tokens(self.length, self.ranks) for first, count in ranges]
        rows = args[1].clone().reshape(-1, self.length)
        rows[:, sorted(ends)[:-1]] = kwargs.get("ignore_index", -100)
        return func(args[0], rows.reshape(args[1].shape), *args[2:], **kwargs)
