"""What one operator costs: its class, the shape that decides its speed, its FLOPs and the bytes it moves.

FLOPs count a multiplication and an addition as two. They are torch's own formulas (`torch.utils.flop_counter`)
where it has one, so matrix products, convolutions and attention count and everything else is zero:

    matmul (m×k)·(k×n)          2·m·n·k
    convolution                 2·outputs·weights of a filter; each gradient as much again
    attention, forward          4·batch·heads·queries·keys·dim
    attention, backward         10·batch·heads·queries·keys·dim      (five products)

    grouped product             2·tokens·n·k: each token is multiplied with one of the matrices

Bytes are those of every distinct tensor read or written; a view moves nothing.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from meshwright.blocks.operator_kinds import Kind

aten = torch.ops.aten
_FLOPS: dict[Any, Callable[..., int]] = dict(flop_registry)


def of_recomputing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether only a forward pass that will be computed again has it, so that it does not count where passes are laid
    side by side: `detach` of what is kept, and, before torch 2.12, two tensors of no size a block."""
    return name == "detach" or (name == "empty" and bool(args) and 0 in args[0])


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if "attention" in packet.__name__:
        return _attention_flops(packet.__name__, args)
    if packet is aten.convolution_backward:
        wanted = sum(bool(flag) for flag in args[10][:2])  # the gradients of the input and of the weight
        return wanted * _convolution_flops(args[1], args[2], args[0], transposed=args[7])
    if packet is aten.convolution:
        return _convolution_flops(args[0], args[1], result, transposed=args[6])
    if packet is aten._grouped_mm:
        left, right = args[:2]
        return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])
    count = _FLOPS.get(packet)
    return int(count(*args, **kwargs, out_val=result)) if count else 0


def shape_of(kind: Kind, func: Any, args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """(batch, m, n, k) of a product; (batch, heads, queries, keys, dim, 1 where it is causal) of attention; (n, c_in,
    h, w, c_out, kernel, stride, groups) of a convolution; else the elements of the result."""
    if kind == "matmul":
        left, right = [value for value in args if isinstance(value, Tensor)][-2:]
        *batch, m, k = left.shape
        return (prod(batch), m, right.shape[-1], k)
    if kind == "attention":
        return (*_attention_shape(args), int(_is_causal(func, args)))
    if kind == "convolution":
        return _convolution_shape(func, args)
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return (leaves[0].numel(),) if leaves else ()


def workspace_of(kind: Kind, func: Any, args: tuple[Any, ...], result: Any) -> int:
    """What a convolution takes on a GPU for the time it runs: its images and filters once more, with the channels
    last, as tensor cores want them (validation/memory/convolution_workspaces.json). Images that have them last already,
    filters of one pixel on rows of whole 16 bytes, and convolutions of each channel by itself need none."""
    if kind != "convolution":
        return 0
    back = func._overloadpacket is aten.convolution_backward
    grad, image, weight = args[0], args[1 if back else 0], args[2 if back else 1]
    stride, groups = args[4 if back else 3], args[9 if back else 8]
    output = grad if back else result
    if image.dim() < 4 or groups == image.shape[1] or image.is_contiguous(memory_format=torch.channels_last):
        return 0
    pixels = prod(image.shape[2:]) * image.element_size()
    if prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride) and pixels % 16 == 0:
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in (image, weight, output))


def bytes_of(kind: Kind, arguments: Iterable[Any], result: Any) -> int:
    if kind == "view":
        return 0
    seen: dict[int, int] = {}
    for leaf in (*tree_leaves(tuple(arguments)), *tree_leaves(result)):
        if isinstance(leaf, Tensor):
            seen[id(leaf)] = leaf.numel() * leaf.element_size()
    return sum(seen.values())


def _is_causal(func: Any, args: tuple[Any, ...]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("is_causal") if "is_causal" in names else len(args)
    return place < len(args) and bool(args[place])


def _convolution_shape(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Of other than two dimensions, those of images with as many pixels, and filters with as many weights."""
    back = func._overloadpacket is aten.convolution_backward
    image, weight = args[1:3] if back else args[:2]
    stride, groups = (args[4], args[9]) if back else (args[3], args[8])
    height, width = image.shape[2:] if image.dim() == 4 else (prod(image.shape[2:]), 1)
    kernel = round(prod(weight.shape[2:]) ** 0.5)
    return (image.shape[0], image.shape[1], height, width, weight.shape[0], kernel, max(stride), groups)


def _attention_shape(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Queries and keys are the first two four-dimensional tensors, in backward after the output's gradient."""
    tensors = [value for value in args if isinstance(value, Tensor) and value.dim() == 4]
    query, key = tensors[-3:-1] if len(tensors) == 3 else tensors[1:3]
    batch, heads, queries, dim = query.shape
    return (batch, heads, queries, key.shape[2], dim)


def _convolution_flops(input: Tensor, weight: Tensor, output: Tensor, transposed: bool) -> int:
    """Two a weight of a filter and position; torch's own formula takes the backward pass of groups for whole."""
    positions = input.numel() if transposed else output.numel()
    return 2 * positions * prod(weight.shape[1:])


def _attention_flops(name: str, args: tuple[Any, ...]) -> int:
    products = 5 if "backward" in name else 2
    return 2 * products * prod(_attention_shape(args))
