"""The precision in which a model computes, and the dtype in which its gradients are reduced.

    plan        matrix products      forward pass     gradients of weights   loss, norms, sums
    fp32        fp32, no tf32        model dtypes     model dtypes           at least fp32
    tf32        10 bits of mantissa  model dtypes     model dtypes           "
    bf16, fp16  bf16 or fp16         autocast         model dtypes           "
    fp8         8 bits (linear)      bf16 autocast    model dtypes           "

With `cast: weights` FSDP2 rounds weights before it gathers them; the shards keep the dtype of the model.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.dtypes import AUTOCAST_DTYPES, HALF_DTYPES, float32_matmul_precision
from meshwright.plan import Plan
from meshwright.profile.grouped_products import CASTS_OF_GROUPED_PRODUCTS


def forward_precision(plan: Plan, device_type: str) -> AbstractContextManager[Any]:
    """The context in which a model's forward pass runs. Each forward pass needs a new one. Compiled functions enter it,
    so it must not register anything with torch: see `register_casts`."""
    if plan.numerics.precision in AUTOCAST_DTYPES:
        return torch.autocast(device_type, dtype=AUTOCAST_DTYPES[plan.numerics.precision])
    return nullcontext()


def register_casts(plan: Plan, user: object) -> None:
    """Registers with torch what autocast leaves out, if the plan uses autocast, until `user` is freed: the object that
    runs forward passes in `forward_precision`."""
    if plan.numerics.precision in AUTOCAST_DTYPES:
        CASTS_OF_GROUPED_PRODUCTS.make_for(user)


def fp32_product_precision(plan: Plan, device_type: str) -> AbstractContextManager[Any]:
    """The context in which forward and backward passes run. On a GPU it makes fp32 matrix products and convolutions
    compute in tf32 if that is the plan's precision, otherwise in fp32 (PyTorch's default rounds convolutions to
    tf32)."""
    if device_type != "cuda":
        return nullcontext()
    return float32_matmul_precision("tf32" if plan.numerics.precision == "tf32" else "fp32")


def gathered_weight_dtype(plan: Plan) -> torch.dtype | None:
    """The dtype in which the shard axis gathers weights; None for the weights' own dtype."""
    return AUTOCAST_DTYPES[plan.numerics.precision] if plan.numerics.cast == "weights" else None


def gradient_reduce_dtype(plan: Plan) -> torch.dtype | None:
    """The dtype in which gradients are reduced over the data ranks; None for the gradients' own dtype."""
    return HALF_DTYPES.get(plan.gradients.precision)


def sharding_policy(plan: Plan) -> MixedPrecisionPolicy:
    param_dtype, reduce_dtype = gathered_weight_dtype(plan), gradient_reduce_dtype(plan)
    if param_dtype is not None and reduce_dtype is None:
        reduce_dtype = torch.float32  # FSDP2's default is the dtype of the gathered weights
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
