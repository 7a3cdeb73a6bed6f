"""Load-balancing losses of mixtures of experts, over the whole global batch.

Models of the transformers library with `output_router_logits` add such a loss to their own, by a function that is in
the file of the model. With E experts, and sums over all layers and all T rows that are not padding:

    c_e = number of rows that choose expert e        P_e = Σ of the router's probabilities for expert e
    loss = E · Σ over e of  c_e / T · P_e / T                                            _balance()

It is no mean over rows, so the mean of the ranks' losses is not that of the global batch. The sums are (`_sums`): they
are added up over the data ranks, in the forward pass and in the backward pass. Each rank then has the loss of the
global batch; the weights of the ranks' losses add up to 1.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.context.sequence_view import gather_sequence_views, sum_over_ranks
from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.tensor.shard_view import gather_shard_views
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.profile.experts import balances_experts

_NAME = "load_balancing_loss_func"
_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
_TOLERANCE = 1e-5  # of the two ways to compute a loss, in fp32


class RouterLosses:
    """The functions with which a model computes load-balancing losses. `is_used` says whether the model calls one, as
    far as its configuration or a forward pass has shown."""

    def __init__(self, model: nn.Module) -> None:
        self._files = _files_of(model)
        self._group: AxisGroup | None = None
        self._plan: Plan | None = None
        self._is_left_out = False
        self._known: dict[ModuleType, bool] = {}  # by file, whether its function is the one of this equation
        self.is_used = bool(self._files) and balances_experts(model)

    def connect(self, plan: Plan, group: AxisGroup | None) -> None:
        """From now on, losses are those of the global batch, which the ranks of `group` share."""
        self._plan, self._group = plan, group

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Within this context, these losses are 0: what remains is to be a mean over samples or targets."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False

    @contextmanager
    def active(self, has_samples: bool) -> Iterator[None]:
        """The context of a forward pass of the model. Without samples, a rank only takes part in the sums."""
        originals = {file: getattr(file, _NAME) for file in self._files}
        for file, original in originals.items():
            setattr(file, _NAME, partial(self._call, file, original, has_samples))
        try:
            yield
        finally:
            for file, original in originals.items():
                setattr(file, _NAME, original)

    @torch.compiler.disable
    def _call(
        self, file: ModuleType, original: Callable[..., Any], has_samples: bool, *args: Any, **kwargs: Any
    ) -> Any:
        self.is_used = True
        shares = self._plan.batch_parts if self._plan is not None else 1
        if file not in self._known:
            self._known[file] = _is_known(original)
        is_known = self._known[file]
        if self._is_left_out and is_known:
            return torch.zeros(())
        if shares == 1 or self._is_left_out or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        assert self._plan is not None
        if not is_known:
            raise InputError(
                f"{_NAME} of {file.__name__} computes a load-balancing loss in a way of its own, which cannot be"
                f" computed over the {self._plan.data_ranks} data ranks × {self._plan.microbatches} microbatches of the"
                f" plan ({self._plan.summary()}): set output_router_logits of the model's configuration to false, or"
                " use a plan that does not divide the batch"
            )
        check_rules(self._plan, routers=True)
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        logits, experts, top_k, mask = (bound.arguments[name] for name in _ARGUMENTS)
        if not isinstance(logits, tuple):
            return original(*args, **kwargs)
        sums = gather_shard_views(gather_sequence_views(_sums(logits, experts, top_k, mask)))
        sums = sums if has_samples else sums * 0
        return _balance(sum_over_ranks(sums, self._group) if self._group is not None else sums)


def _files_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules of the model's classes that have such a function."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    return [sys.modules[name] for name in sorted(names) if callable(getattr(sys.modules.get(name), _NAME, None))]


def _is_known(function: Callable[..., Any]) -> bool:
    """Whether the function computes the loss of this file's equation, found out by trying."""
    if tuple(inspect.signature(function).parameters) != _ARGUMENTS:
        return False
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=draw) for _ in range(2))
    try:
        with torch.no_grad():
            for mask in (None, torch.tensor([[1, 1, 1], [1, 1, 0]])):
                expected, value = function(logits, 4, 2, mask), _balance(_sums(logits, 4, 2, mask))
                if abs(float(expected) - float(value)) > _TOLERANCE * abs(float(value)):
                    return False
    except Exception:  # whatever a function of another kind raises
        return False
    return True


def _sums(logits: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None) -> Tensor:
    """Returns (c_0, …, P_0, …, T) of a batch. `logits` has one tensor (rows, experts) per layer; the mask is 0 for
    rows that are padding."""
    totals: list[Tensor] = []
    for layer_logits in logits:
        scores = layer_logits.to(logits[0].device, torch.promote_types(layer_logits.dtype, torch.float32))
        probabilities = scores.reshape(-1, experts).softmax(-1)
        rows = torch.ones_like(probabilities[:, 0]) if mask is None else mask.reshape(-1).to(probabilities)
        chosen = probabilities.detach().topk(top_k, -1).indices
        counts = torch.zeros_like(probabilities).scatter(1, chosen, 1.0)
        sums = [(values * rows[:, None]).sum(0) for values in (counts, probabilities)]
        totals.append(torch.cat([*sums, rows.sum()[None]]))
    return torch.stack(totals).sum(0)


def _balance(sums: Tensor) -> Tensor:
    experts = len(sums) // 2
    counts, probabilities, rows = sums[:experts], sums[experts:-1], sums[-1]
    return experts * (counts / rows * (probabilities / rows)).sum()
