"""`GpuRules`: makes a forward pass on fake CPU tensors run the operators, and save the tensors, of a pass on a GPU.

GPU and CPU differ in these points:

- Autocast on CUDA computes a list of operators in fp32 (powers, norms, softmax, sums, losses) that autocast on the CPU
  computes in the dtype of their inputs. Both compute the same matrix products and convolutions in half precision.
- Attention with dropout is one fused operator on a GPU; the CPU falls back to matrix products that save every score.
  Attention is therefore run without dropout.
- Dropout is one fused operator on a GPU that saves a mask of one byte per element; the CPU draws, divides and saves
  noise in the dtype of the input.
- RMS norm is one fused operator on a GPU that saves its input; the CPU runs several operators and saves their results.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.dtypes import widen_half
from meshwright.profile.fake import FakeRules
from meshwright.profile.torch_private import tree_map

# The operators of CUDA's autocast that "autocast to float32" in torch's documentation of automatic mixed precision.
_FP32_NAMES = (
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss "
    "cdist cosine_similarity cross_entropy_loss cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss "
    "kl_div l1_loss layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss "
    "multilabel_margin_loss_nd multi_margin_loss nll_loss nll_loss_nd norm normalize pdist poisson_nll_loss pow prod "
    "reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan "
    "triplet_margin_loss"
)
_IN_FP32 = frozenset(_FP32_NAMES.split())


class GpuRules(FakeRules):
    """Within this mode, a pass on fake CPU tensors runs the operators and saves the tensors of a GPU."""

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
            args, kwargs = tree_map(widen_half, args), tree_map(widen_half, kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _attention_flags(args: tuple[Any, ...]) -> dict[str, Any]:
    """The keyword arguments that replace positional arguments after `dropout_p` in a call of attention; empty if there
    are none."""
    return {"is_causal": args[5]} if len(args) > 5 else {}


def _dropout(func: Any, input: Tensor, p: float = 0.5, train: bool = True, inplace: bool = False, **named: bool) -> Any:
    """Runs dropout as on a GPU. `func` is `torch.dropout` (argument `train`) or `torch.nn.functional.dropout` (argument
    `training`)."""
    training = named.get("training", train)
    if training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, training, *([True] if inplace else []))


# ---- the fused RMS norm: an operator with shapes and a gradient but without a kernel, for fake tensors only


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    scale = weight if weight is not None else input.new_empty(tuple(normalized_shape))
    normed, _ = torch.ops.meshwright.fused_rms_norm(input, scale)
    return normed


@torch.library.custom_op("meshwright::fused_rms_norm", mutates_args=())
def _fused_rms_norm(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("this operator exists for traces on fake tensors only")


@torch.library.custom_op("meshwright::fused_rms_norm_backward", mutates_args=())
def _fused_rms_norm_backward(grad: Tensor, input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("this operator exists for traces on fake tensors only")


def _fake_forward(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = input.shape[: input.dim() - weight.dim()]
    return torch.empty_like(input), input.new_empty((*rows, 1), dtype=torch.float32)


def _fake_backward(grad: Tensor, input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = torch.ops.meshwright.fused_rms_norm_backward(grad, *ctx.saved_tensors)
    return gradients


_fused_rms_norm.register_fake(_fake_forward)
_fused_rms_norm_backward.register_fake(_fake_backward)
_fused_rms_norm.register_autograd(_backward, setup_context=_save_for_backward)
