"""Grouped products, of rows with one matrix per expert (`F.grouped_mm`), where torch leaves something out.

autocast          torch does not cast their operands, so that a mixture under bf16 would compute its experts in
                  fp32: they are cast as those of other products are                CASTS_OF_GROUPED_PRODUCTS
fake tensors      torch knows the shapes of bf16 only; other dtypes are traced as an operator
                  of our own with the same operands and cost                              traced_grouped_product()
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.blocks.process_setting import ProcessSetting

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def _register() -> Callable[[], None]:
    """Registers the casts with torch. Returns the function that removes them."""
    library = torch.library.Library("aten", "IMPL")
    for kind, key in _KEYS.items():
        library.impl("_grouped_mm", _casting(kind, key), key)
    return library._destroy


# Makes autocast cast the operands of grouped products, wherever it is on.
CASTS_OF_GROUPED_PRODUCTS = ProcessSetting(_register)


def _casting(kind: str, key: str) -> Any:
    autocast_keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def product(
        left: Tensor,
        right: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        wide = torch.float64 in (left.dtype, right.dtype)
        dtype = left.dtype if wide else torch.get_autocast_dtype(kind)
        with torch._C._ExcludeDispatchKeyGuard(autocast_keys):
            result: Tensor = torch.ops.aten._grouped_mm(left.to(dtype), right.to(dtype), offs, bias, out_dtype)
            return result

    return product


def traced_grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """A grouped product on fake tensors of any dtype. `right` has one matrix per group, or it has as many rows as
    `left` has columns, which are divided into groups."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        left, right = left.to(dtype), right.to(dtype)
    if left.dtype == right.dtype == torch.bfloat16:
        in_bf16: Tensor = torch.ops.aten._grouped_mm(left, right, ends)
        return in_bf16
    product: Tensor = torch.ops.meshwright.grouped_product(left, right, ends)
    return product


@torch.library.custom_op("meshwright::grouped_product", mutates_args=())
def _grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.aten._grouped_mm(left, right, ends)


@_grouped_product.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[-1])
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, ends = ctx.saved_tensors
    of_left = torch.ops.meshwright.grouped_product(gradient, right.transpose(-2, -1), ends)
    return of_left, torch.ops.meshwright.grouped_product(left.transpose(-2, -1), gradient, ends), None


_grouped_product.register_autograd(_gradients, setup_context=_save)
