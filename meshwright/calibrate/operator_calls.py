"""Operators of a profile as calls that can be run here, with the data they would find in a step.

A profile tells what decides an operator's speed, not its arguments: the padding of a convolution follows from its
FLOPs, the images of a pooling from the convolution before it. What cannot be told is not built. A `Scene` hands each
call what the one before it has just computed, where sizes agree, so that caches are as warm as they are in a step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profile.values import ITEM_BYTES, Growth, Operator
from meshwright.simulator.compute.lookup import bias_of

aten = torch.ops.aten
Act = Callable[["Scene"], Tensor]
_Shape = tuple[int, ...]
_WINDOWS = ((2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 1, 1))  # kernel, stride and padding of poolings
_OF_ONE = ("relu", "relu_", "gelu", "silu", "tanh", "sigmoid", "exp", "neg")
_OF_TWO = ("add", "add_", "mul", "mul_", "sub", "div", "gelu_backward", "silu_backward", "tanh_backward")
_TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Scene:
    """Tensors of one rank: `made` of random numbers, `last` what was computed last, by size and type, and `kept` what
    the forward pass computed and the backward pass has yet to read."""

    device: torch.device
    channels_last: bool = False
    made: dict[object, Tensor] = field(default_factory=dict)
    last: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)

    def take(self, shape: _Shape, dtype: torch.dtype) -> Tensor:
        """What was computed last with so many numbers, or else random ones."""
        found = _as(self.last.get((prod(shape), dtype)), shape)
        return self.weight(shape, dtype) if found is None else found

    def saved(self, shape: _Shape, dtype: torch.dtype, place: object) -> Tensor:
        """The same of what the forward pass has kept."""
        size = prod(shape)
        known = next((t for t in reversed(self.kept) if t.numel() == size and t.dtype == dtype), None)
        found = _as(known, shape)
        return self.weight(shape, dtype, place) if found is None else found

    def flat(self, size: int, dtype: torch.dtype) -> Tensor:
        """The same of any shape."""
        found = self.last.get((size, dtype))
        return self.weight((size,), dtype) if found is None else found

    def pair(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One that was just computed, and one that was kept."""
        found = self.flat(size, dtype)
        return found, self.saved(tuple(found.shape), dtype, "kept")

    def weight(self, shape: _Shape, dtype: torch.dtype, place: object = "") -> Tensor:
        """Small enough for sums of products not to grow from layer to layer."""
        key = (place, shape, dtype)
        if key not in self.made:
            scale = max(1, prod(shape[1:])) ** -0.5 if place else 1.0
            values = (scale * torch.randn(shape, device=self.device)).to(dtype)
            lies_last = self.channels_last and len(shape) == 4
            self.made[key] = values.contiguous(memory_format=torch.channels_last) if lies_last else values
        return self.made[key]

    def put(self, result: Tensor) -> None:
        self.last[(result.numel(), result.dtype)] = result

    def clear(self) -> None:
        """As at the end of a step: all but the weights is given back."""
        self.last.clear()
        self.kept.clear()

    def settle(self) -> None:
        """Weights are older than anything that a step computes, and so lie below it: only then can a process give the
        memory of a step back to the system, and has to ask for it again in the next, as it does in training."""
        self.clear()
        self.made = {key: _again(tensor) for key, tensor in self.made.items()}


def _again(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.clone()


def _as(found: Tensor | None, shape: _Shape) -> Tensor | None:
    if found is None or found.shape == shape:
        return found
    return found.view(shape) if found.is_contiguous() else None


@dataclass
class Builder:
    """Builds the operators of a step in their order; `images` are the shapes that were met, by their size."""

    batch: int
    biased: bool  # whether a convolution adds its bias itself
    images: dict[int, _Shape] = field(default_factory=dict)

    def build(self, operator: Operator, backward: bool) -> Act | None:
        """None where the profile does not tell enough."""
        dtype = _TYPES.get(operator.dtype)
        if dtype is None:
            return None
        if operator.kind == "convolution":
            return self._convolution(operator, dtype, backward)
        if operator.kind == "matmul":
            return _product(operator, self._sizes(operator.shape), dtype)
        if operator.kind == "attention":
            return _attention(self._sizes(operator.shape), dtype, backward)
        if operator.name.startswith("max_pool2d_with_indices"):
            return self._pooling(operator, dtype, backward)
        if "batch_norm" in operator.name:
            return self._batch_norm(operator, dtype, backward)
        return _moving(operator, self._sizes(operator.shape), round(operator.bytes.at(self.batch)), dtype)

    def _sizes(self, shape: tuple[Growth, ...]) -> _Shape:
        return tuple(round(size.at(self.batch)) for size in shape)

    def _convolution(self, operator: Operator, dtype: torch.dtype, backward: bool) -> Act | None:
        n, c_in, h, w, c_out, kernel, stride, groups = self._sizes(operator.shape)
        image, filters = (n, c_in, h, w), (c_out, c_in // groups, kernel, kernel)
        place, bias = object(), self.biased and bias_of(operator, self.batch, backward) > 0
        of_one = 2 * n * c_out * prod(filters[1:])
        for gradients in (2, 1) if backward else (1,):
            found = _padding(h, w, kernel, stride, operator.flops.at(self.batch) / gradients / of_one)
            if found is None:
                continue
            padding, out = found[0], (n, c_out, *found[1:])
            self.images.update({prod(image): image, prod(out): out})
            options = ([stride, stride], [padding, padding], [1, 1], False, [0, 0], groups)
            if not backward:
                return lambda scene: aten.convolution(
                    scene.take(image, dtype),
                    scene.weight(filters, dtype, place),
                    scene.weight((c_out,), dtype, place) if bias else None,
                    *options,
                )
            wanted, sizes = [gradients == 2, True, bias], [c_out] if bias else None
            return lambda scene: _largest(
                aten.convolution_backward(
                    scene.take(out, dtype),
                    scene.saved(image, dtype, place),
                    scene.weight(filters, dtype, place),
                    sizes,
                    *options,
                    wanted,
                )
            )
        return None

    def _pooling(self, operator: Operator, dtype: torch.dtype, backward: bool) -> Act | None:
        (made,), moved, item = self._sizes(operator.shape), operator.bytes.at(self.batch), ITEM_BYTES[operator.dtype]
        # Each result comes with the place it was found at, an integer of eight bytes.
        large = made if backward else round((moved - made * (item + 8)) / item)
        small = round((moved - 2 * made * item) / (item + 8)) if backward else made
        image = self.images.get(large)
        if image is None:
            return None
        for kernel, stride, padding in _WINDOWS:
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in image[2:])
            out = (*image[:2], height, width)
            if prod(out) == small:
                self.images[small] = out
                window = ([kernel, kernel], [stride, stride], [padding, padding])
                if not backward:
                    return lambda scene: aten.max_pool2d_with_indices(scene.take(image, dtype), *window)[0]
                return _pooling_backward(image, out, window, dtype)
        return None

    def _batch_norm(self, operator: Operator, dtype: torch.dtype, backward: bool) -> Act | None:
        image = self.images.get(self._sizes(operator.shape)[0])
        if image is None:
            return None
        vector, place = (image[1],), object()

        def run(scene: Scene) -> Tensor:
            ones = scene.made.setdefault((place, "ones"), torch.ones(vector, device=scene.device))
            x = scene.take(image, dtype)
            if not backward:
                return aten.native_batch_norm(x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5)[0]
            saved = scene.saved(image, dtype, place)
            return aten.native_batch_norm_backward(
                x, saved, ones, ones, ones, ones, ones, True, 1e-5, [True, True, True]
            )[0]

        return run


def _padding(h: int, w: int, kernel: int, stride: int, pixels: float) -> tuple[int, int, int] | None:
    """With the sides of the result, of which it is known how many pixels it has."""
    for padding in range(kernel):
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (h, w))
        if abs(height * width - pixels) < 0.5:
            return padding, height, width
    return None


def _largest(results: Any) -> Tensor:
    return max((result for result in results if result is not None), key=Tensor.numel)


def _pooling_backward(image: _Shape, out: _Shape, window: tuple[list[int], ...], dtype: torch.dtype) -> Act:
    place = object()

    def run(scene: Scene) -> Tensor:
        saved = scene.saved(image, dtype, place)
        key = (place, "indices")
        if key not in scene.made:
            scene.made[key] = aten.max_pool2d_with_indices(saved, *window)[1]
        gradient = scene.take(out, dtype)
        return aten.max_pool2d_with_indices_backward(gradient, saved, *window, [1, 1], False, scene.made[key])

    return run


def _product(operator: Operator, shape: _Shape, dtype: torch.dtype) -> Act:
    """A forward pass multiplies with the transposed weight; of a weight's gradient the inner side is the samples."""
    many, m, n, k = shape
    place = object()
    if many > 1:
        return lambda scene: torch.bmm(scene.take((many, m, k), dtype), scene.weight((many, k, n), dtype, place))
    if not operator.gradient and operator.name == "addmm":
        return lambda scene: torch.addmm(
            scene.weight((n,), dtype, place), scene.take((m, k), dtype), scene.weight((n, k), dtype, place).t()
        )
    if not operator.gradient:
        return lambda scene: scene.take((m, k), dtype) @ scene.weight((n, k), dtype, place).t()
    if operator.shape[3].linear and not operator.shape[1].linear:
        return lambda scene: scene.take((k, m), dtype).t() @ scene.saved((k, n), dtype, place)
    return lambda scene: scene.take((m, k), dtype) @ scene.weight((k, n), dtype, place)


def _attention(shape: _Shape, dtype: torch.dtype, backward: bool) -> Act:
    batch, heads, queries, keys, width, causal = shape
    place = object()

    def forward(scene: Scene, *, graph: bool) -> tuple[list[Tensor], Tensor]:
        sides = [queries, keys, keys]
        parts = [scene.weight((batch, heads, side, width), dtype, (place, n)) for n, side in enumerate(sides)]
        parts = [part.detach().requires_grad_(graph) for part in parts]
        q, k, v = parts
        return parts, F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))

    def run(scene: Scene) -> Tensor:
        if not backward:
            return forward(scene, graph=False)[1]
        key = (place, "graph")
        if key not in scene.made:
            with torch.enable_grad():
                parts, scene.made[key] = forward(scene, graph=True)
            scene.made.update({(place, "part", n): part for n, part in enumerate(parts)})
        parts = [scene.made[(place, "part", n)] for n in range(3)]
        result = scene.made[key]
        return torch.autograd.grad(result, parts, torch.ones_like(result), retain_graph=True)[0]

    return run


def _moving(operator: Operator, shape: _Shape, moved: int, dtype: torch.dtype) -> Act | None:
    """What is bound by the bytes it moves: sums, casts, and numbers one by one."""
    if not shape or not shape[0]:
        return None
    (size, *_), item, name = shape, dtype.itemsize, operator.name
    if name == "threshold_backward":
        return lambda scene: aten.threshold_backward(*scene.pair(size, dtype), 0)
    if name == "_to_copy":
        other = torch.float32 if item == 2 else torch.bfloat16
        cast = other if moved != 2 * size * item else dtype
        return lambda scene: scene.flat(size, dtype).to(cast, copy=True)
    if name == "sum" and moved // item % size == 0:
        return lambda scene: scene.take((moved // item // size - 1, size), dtype).sum(0, keepdim=True)
    call = getattr(aten, name, None)
    if name in _OF_ONE:
        return lambda scene: call(scene.flat(size, dtype))  # type: ignore[misc]
    if name in _OF_TWO and moved >= (2 if name.endswith("_") else 3) * size * item:
        return lambda scene: call(*scene.pair(size, dtype))  # type: ignore[misc]
    return None
