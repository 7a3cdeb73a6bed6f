"""What one operator costs: its FLOPs, the bytes it moves, the shape that decides its speed, and its workspace.

FLOPs count a multiplication and an addition as two (`operator_flops`). Convolutions, attention and grouped matmul have
their formula in this file. Every other operator has the formula of torch (`torch.utils.flop_counter`), or counts as
zero if torch has none for it:

    matmul (m×k)·(k×n)          2·m·n·k
    convolution                 2·outputs·weights of a filter; each gradient costs as much again
    attention, forward          4·batch·heads·queries·keys·dim
    attention, backward         10·batch·heads·queries·keys·dim      (five matrix products)
    grouped matmul              2·tokens·n·k: each token is multiplied with one of the matrices

The bytes of an operator are those of every distinct tensor that it reads or writes. A view moves no bytes
(`operator_bytes`).
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from meshwright.blocks.operator_kinds import GROUPED_PRODUCTS, OperatorKind
from meshwright.profile.torch_private import operator_arguments, operator_name, operator_packet, tree_leaves

aten = torch.ops.aten
_TORCH_FORMULAS: dict[Any, Callable[..., int]] = dict(flop_registry)


def is_checkpoint_artifact(name: str, args: tuple[Any, ...]) -> bool:
    """Whether `torch.utils.checkpoint` itself adds this operator to a forward pass that will be recomputed. It adds
    `detach` of saved tensors and, before torch 2.12, two tensors without elements per block. Code that matches the
    operators of two passes one to one skips such operators."""
    return name == "detach" or (name == "empty" and bool(args) and 0 in args[0])


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of one call of an operator with these arguments and this result."""
    packet, name = operator_packet(func), operator_name(func)
    if "attention" in name:
        return _attention_flops(name, args)
    if packet is aten.convolution_backward:
        gradient_count = sum(bool(flag) for flag in args[10][:2])  # the gradients of the input and of the weight
        return gradient_count * _convolution_flops(args[1], args[2], args[0], transposed=args[7])
    if packet is aten.convolution:
        return _convolution_flops(args[0], args[1], result, transposed=args[6])
    if packet is aten._grouped_mm or name in GROUPED_PRODUCTS:
        left, right = args[:2]
        columns = right.shape[1] if name == "looped_product" else right.shape[-1]
        return int(2 * left.shape[-2] * left.shape[-1] * columns)
    formula = _TORCH_FORMULAS.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def operator_shape(kind: OperatorKind, func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """Returns the sizes that decide an operator's speed.

    - matmul: (batch, m, n, k); of a grouped one, m is the number of rows of all groups
    - attention: (batch, heads, queries, keys, dim, 1 if it is causal else 0)
    - convolution: (n, c_in, h, w, c_out, kernel, stride, groups)
    - anything else: (number of elements of the first result,), or () if the operator returns no tensor
    """
    if kind == "matmul":
        tensors = [value for value in args if isinstance(value, Tensor)]
        # The last tensor of a grouped product has the offsets of its groups.
        is_grouped = operator_packet(func) is aten._grouped_mm or operator_name(func) in GROUPED_PRODUCTS
        left, right = tensors[:2] if is_grouped else tensors[-2:]
        *batch, m, k = left.shape
        return (prod(batch), m, right.shape[-1], k)
    if kind == "attention":
        return (*_attention_shape(args), int(_is_causal(func, args)))
    if kind == "convolution":
        return _convolution_shape(func, args)
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return (leaves[0].numel(),) if leaves else ()


def operator_workspace_bytes(kind: OperatorKind, func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that an operator allocates on a GPU while it runs; 0 for every operator other than a convolution. A
    convolution copies image, filters and result to the channels-last layout of the tensor cores
    (validation/memory/convolution_workspaces.json). It needs no copy if the image is channels-last already, if the
    filter is 1×1 with stride 1 and the bytes of a channel are a multiple of 16, if the convolution is depthwise, or if
    it has only one spatial dimension."""
    if kind != "convolution":
        return 0
    is_backward = operator_packet(func) is aten.convolution_backward
    grad, image, weight = args[0], args[1 if is_backward else 0], args[2 if is_backward else 1]
    stride, groups = args[4 if is_backward else 3], args[9 if is_backward else 8]
    output = grad if is_backward else result
    if image.dim() < 4 or groups == image.shape[1] or image.is_contiguous(memory_format=torch.channels_last):
        return 0
    channel_bytes = prod(image.shape[2:]) * image.element_size()
    if prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride) and channel_bytes % 16 == 0:
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in (image, weight, output))


def operator_bytes(kind: OperatorKind, arguments: Iterable[Any], result: Any) -> int:
    """Bytes of all distinct tensors that one call of an operator reads or writes."""
    if kind == "view":
        return 0
    sizes: dict[int, int] = {}
    for leaf in (*tree_leaves(tuple(arguments)), *tree_leaves(result)):
        if isinstance(leaf, Tensor):
            sizes[id(leaf)] = leaf.numel() * leaf.element_size()
    return sum(sizes.values())


def _is_causal(func: Any, args: tuple[Any, ...]) -> bool:
    names = [argument.name for argument in operator_arguments(func)]
    index = names.index("is_causal") if "is_causal" in names else len(args)
    return index < len(args) and bool(args[index])


def _convolution_shape(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The `operator_shape` of a convolution. A convolution with one or three spatial dimensions counts as a
    two-dimensional one with as many pixels per image and about as many weights per filter."""
    is_backward = operator_packet(func) is aten.convolution_backward
    image, weight = args[1:3] if is_backward else args[:2]
    stride, groups = (args[4], args[9]) if is_backward else (args[3], args[8])
    height, width = image.shape[2:] if image.dim() == 4 else (prod(image.shape[2:]), 1)
    kernel = round(prod(weight.shape[2:]) ** 0.5)
    return (image.shape[0], image.shape[1], height, width, weight.shape[0], kernel, max(stride), groups)


def _attention_shape(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns (batch, heads, queries, keys, dim). In the forward pass, query and key are the first two four-dimensional
    arguments; in the backward pass they follow the gradient of the output."""
    tensors = [value for value in args if isinstance(value, Tensor) and value.dim() == 4]
    query, key = tensors[-3:-1] if len(tensors) == 3 else tensors[1:3]
    batch, heads, queries, dim = query.shape
    return (batch, heads, queries, key.shape[2], dim)


def _convolution_flops(input: Tensor, weight: Tensor, output: Tensor, transposed: bool) -> int:
    """Two FLOPs per weight of a filter and per position where the filter is applied. Torch's own formula is not used
    because it ignores groups in the backward pass."""
    positions = input.numel() if transposed else output.numel()
    return 2 * positions * prod(weight.shape[1:])


def _attention_flops(name: str, args: tuple[Any, ...]) -> int:
    products = 5 if "backward" in name else 2
    return 2 * products * prod(_attention_shape(args))
