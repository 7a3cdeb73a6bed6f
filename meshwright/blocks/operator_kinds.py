"""The kind of a torch operator (matmul, convolution, ...). Efficiency is measured and looked up by kind, and selective
recomputation saves the results of some kinds."""

from typing import Any, Literal

import torch

OperatorKind = Literal[
    "matmul", "convolution", "attention", "norm", "embedding", "reduction", "elementwise", "copy", "view"
]

aten = torch.ops.aten

# Grouped products that are no operators of torch: of profile/grouped_products.py, of workloads/text/experts.py, and of
# the transformers library where torch has no kernel.
GROUPED_PRODUCTS = ("grouped_product", "looped_product", "looped_weight_gradient", "grouped_mm_fallback")
_MATMUL = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, aten._grouped_mm}
_CONVOLUTION = {aten.convolution, aten.convolution_backward, aten.cudnn_convolution}
_NORM = (
    "native_layer_norm",
    "native_batch_norm",
    "native_group_norm",
    "fused_rms_norm",
    "_fused_rms_norm",
    "batch_norm",
)
_REDUCTION = (
    "sum",
    "mean",
    "softmax",
    "nll_loss",
    "max",
    "min",
    "norm",
    "argmax",
    "topk",
    "var",
    "pool",
    "cumsum",
    "amax",
)
_COPY = (
    "copy_",
    "clone",
    "_to_copy",
    "cat",
    "stack",
    "contiguous",
    "fill",
    "zero",
    "new_",
    "empty",
    "index_put",
    "slice_scatter",
)


def operator_kind(func: Any) -> OperatorKind:
    """The kind of an operator, given the `OpOverload` that torch dispatches."""
    packet = func._overloadpacket
    name = packet.__name__
    if packet in _MATMUL or name in GROUPED_PRODUCTS:
        return "matmul"
    if packet in _CONVOLUTION:
        return "convolution"
    if "attention" in name:
        return "attention"
    if name.startswith(_NORM):
        return "norm"
    if "embedding" in name:
        return "embedding"
    if func.is_view or name == "_unsafe_view":
        return "view"
    if any(word in name for word in _REDUCTION):
        return "reduction"
    if any(word in name for word in _COPY):
        return "copy"
    return "elementwise"
