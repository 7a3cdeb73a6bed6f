"""What a GPU would do otherwise than the CPU whose fake tensors stand in for its own.

- Autocast on CUDA computes a list of operators in fp32 (powers, norms, softmax, sums, losses) that the CPU leaves in
  the type they are given; both lower the same products and convolutions.
- Attention with dropout is one fused operator on a GPU; the CPU falls back to a product that keeps every score.
- Dropout is one fused operator on a GPU that keeps a mask of one byte a number; the CPU makes, divides and keeps noise
  of the numbers' own type.
- RMS norm is one fused operator on a GPU that keeps its input; the CPU runs and keeps its parts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# The operators of CUDA's autocast that "autocast to float32" in torch's documentation of automatic mixed precision.
_NAMES = (
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss "
    "cdist cosine_similarity cross_entropy_loss cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss "
    "kl_div l1_loss layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss "
    "multilabel_margin_loss_nd multi_margin_loss nll_loss nll_loss_nd norm normalize pdist poisson_nll_loss pow prod "
    "reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan "
    "triplet_margin_loss"
)
_IN_FP32 = frozenset(_NAMES.split())


class GpuRules(TorchFunctionMode):
    """While it lasts, a pass on fake CPU tensors runs and keeps what it would on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return func(*args[:4], **{**kwargs, **_attention_flags(args), "dropout_p": 0.0})
        if name == "rms_norm":
            return _rms_norm(*args, **kwargs)
        if name == "dropout":
            return _dropout(func, *args, **kwargs)
        if name in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
        return func(*args, **kwargs)


def _attention_flags(args: tuple[Any, ...]) -> dict[str, Any]:
    """What stands behind dropout in a call by position."""
    return {"is_causal": args[5]} if len(args) > 5 else {}


def _dropout(func: Any, input: Tensor, p: float = 0.5, train: bool = True, inplace: bool = False, **named: bool) -> Any:
    """Of `torch`, or of `torch.nn.functional`, which calls it `training`."""
    trains = named.get("training", train)
    if trains and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, trains, *([True] if inplace else []))


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


# ---- one operator that has a shape and a gradient, and no kernel: it runs on fake tensors only


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    scale = weight if weight is not None else input.new_empty(tuple(normalized_shape))
    normed, _ = torch.ops.meshwright.fused_rms_norm(input, scale)
    return normed


@torch.library.custom_op("meshwright::fused_rms_norm", mutates_args=())
def _fused_rms_norm(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it stands for a GPU's operator in traces only")


@torch.library.custom_op("meshwright::fused_rms_norm_backward", mutates_args=())
def _fused_rms_norm_backward(grad: Tensor, input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it stands for a GPU's operator in traces only")


def _shapes(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = input.shape[: input.dim() - weight.dim()]
    return torch.empty_like(input), input.new_empty((*rows, 1), dtype=torch.float32)


def _backward_shapes(grad: Tensor, input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = torch.ops.meshwright.fused_rms_norm_backward(grad, *ctx.saved_tensors)
    return gradients


_fused_rms_norm.register_fake(_shapes)
_fused_rms_norm_backward.register_fake(_backward_shapes)
_fused_rms_norm.register_autograd(_gradients, setup_context=_keep)
