"""In which precision a model computes, and in which its gradients travel.

    plan        products             forward pass     gradients of weights   loss, norms, sums
    fp32        fp32, no tf32        own types        own types              at least fp32
    tf32        10 bits of mantissa  own types        own types              "
    bf16, fp16  bf16 or fp16         autocast         own types              "
    fp8         8 bits (linear)      bf16 autocast    own types              "

With `cast: weights` FSDP2 gathers weights that are rounded already; what it divides stays as the model was built.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.dtypes import float32_products
from meshwright.plan import Plan

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_TRAVELLING = {"bf16": torch.bfloat16, "fp16": torch.float16}


def forward_precision(plan: Plan, device_type: str) -> AbstractContextManager[Any]:
    """The context a model's forward pass runs in. Make a new one for each pass."""
    if plan.numerics.precision in _AUTOCAST:
        return torch.autocast(device_type, dtype=_AUTOCAST[plan.numerics.precision])
    return nullcontext()


@contextmanager
def arithmetic(plan: Plan, device_type: str) -> Iterator[None]:
    """How fp32 products are computed, forward and backward: PyTorch's own default has convolutions on a GPU round
    to tf32."""
    if device_type != "cuda":
        yield
        return
    with float32_products("tf32" if plan.numerics.precision == "tf32" else "fp32"):
        yield


def gathered_dtype(plan: Plan) -> torch.dtype | None:
    """In which type the shard axis gathers weights; None: their own."""
    return _AUTOCAST[plan.numerics.precision] if plan.numerics.cast == "weights" else None


def travelling_dtype(plan: Plan) -> torch.dtype | None:
    """In which type gradients are combined; None: their own."""
    return _TRAVELLING.get(plan.gradients.precision)


def sharding_policy(plan: Plan) -> MixedPrecisionPolicy:
    weights, gradients = gathered_dtype(plan), travelling_dtype(plan)
    if weights is not None and gradients is None:
        gradients = torch.float32  # otherwise they would travel as the weights do
    return MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=gradients)
