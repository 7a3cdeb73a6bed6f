"""Turns the operators of a `ModelProfile` into calls that run on this machine; `model_operators.py` times them.

A profile records what decides an operator's speed, not its arguments. `CallBuilder` reconstructs the arguments: the
padding of a convolution follows from its FLOPs, the image shape of a pooling from the convolution before it. Operators
whose arguments cannot be reconstructed get no call. `TensorPool` supplies the input tensors. If the result of an
earlier call has the right size, it becomes the input, so that caches are as warm as in a training step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.blocks.convolutions import convolution, convolution_gradients, is_suitable
from meshwright.dtypes import DTYPES_BY_TORCH_NAME, ITEM_BYTES
from meshwright.profile.values import BatchPolynomial, Operator
from meshwright.simulator.compute.lookup import bias_bytes, group_count

aten = torch.ops.aten
OperatorCall = Callable[["TensorPool"], Tensor]
_Shape = tuple[int, ...]
_WINDOWS = ((2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 1, 1))  # kernel, stride and padding of poolings
_UNARY = ("relu", "relu_", "gelu", "silu", "tanh", "sigmoid", "exp", "neg")
_BINARY = ("add", "add_", "mul", "mul_", "sub", "div", "gelu_backward", "silu_backward", "tanh_backward")


@dataclass
class TensorPool:
    """The input tensors of one rank's operator calls.

    `generated` has random and other tensors that are created once and kept. `latest_results` has the most recent result
    for each number of elements and dtype. `saved_activations` are forward results that the backward pass has not read
    yet.
    """

    device: torch.device
    channels_last: bool = False
    generated: dict[object, Tensor] = field(default_factory=dict)
    latest_results: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    saved_activations: list[Tensor] = field(default_factory=list)

    def latest(self, shape: _Shape, dtype: torch.dtype) -> Tensor:
        """Returns the latest result with this number of elements, viewed in this shape, or else a random tensor."""
        tensor = _view_as(self.latest_results.get((prod(shape), dtype)), shape)
        return self.random(shape, dtype) if tensor is None else tensor

    def saved(self, shape: _Shape, dtype: torch.dtype, owner: object) -> Tensor:
        """Returns the latest saved activation with this number of elements, viewed in this shape, or else a random
        tensor that belongs to `owner` (see `random`)."""
        size = prod(shape)
        activation = next((t for t in reversed(self.saved_activations) if t.numel() == size and t.dtype == dtype), None)
        tensor = _view_as(activation, shape)
        return self.random(shape, dtype, owner) if tensor is None else tensor

    def latest_of_size(self, size: int, dtype: torch.dtype) -> Tensor:
        """Returns the latest result with this number of elements in whatever shape it has, or else a random tensor."""
        tensor = self.latest_results.get((size, dtype))
        return self.random((size,), dtype) if tensor is None else tensor

    def latest_and_saved(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the latest result with this number of elements and a saved activation of the same shape."""
        tensor = self.latest_of_size(size, dtype)
        return tensor, self.saved(tuple(tensor.shape), dtype, "saved")

    def random(self, shape: _Shape, dtype: torch.dtype, owner: object = "") -> Tensor:
        """Returns the random tensor for this `owner`, shape and dtype, which is created on first use. Each operator
        call passes its own `owner` for its weights. They are scaled down so that sums of products do not grow from
        layer to layer. Without an owner, all calls share the tensor."""
        key = (owner, shape, dtype)
        if key not in self.generated:
            scale = max(1, prod(shape[1:])) ** -0.5 if owner else 1.0
            values = (scale * torch.randn(shape, device=self.device)).to(dtype)
            is_image = self.channels_last and len(shape) == 4
            self.generated[key] = values.contiguous(memory_format=torch.channels_last) if is_image else values
        return self.generated[key]

    def store(self, result: Tensor, backward: bool = False) -> None:
        """Stores the result of a call. In a backward pass a gradient is freed when the next operators have read it:
        only the latest two results are kept, so that later ones can use the memory of those before."""
        key = (result.numel(), result.dtype)
        self.latest_results.pop(key, None)  # so that the latest result is the last one
        if backward:
            for earlier in list(self.latest_results)[:-1]:
                del self.latest_results[earlier]
        self.latest_results[key] = result

    def clear(self) -> None:
        """Releases everything except the generated tensors, as the end of a training step does."""
        self.latest_results.clear()
        self.saved_activations.clear()

    def reallocate_generated(self) -> None:
        """Clears the pool and allocates the generated tensors anew, so that they lie at lower addresses than all memory
        that a pass allocates. In training, weights lie there too, because they are older than any activation. With this
        order the allocator returns a step's memory to the system at the end of the step and has to request it again in
        the next one, which is part of the time to be measured."""
        self.clear()
        self.generated = {key: _copy_of(tensor) for key, tensor in self.generated.items()}


def _copy_of(tensor: Tensor) -> Tensor:
    """Returns a copy, or the tensor itself if it is part of a recorded autograd graph."""
    return tensor if tensor.requires_grad else tensor.clone()


def _view_as(tensor: Tensor | None, shape: _Shape) -> Tensor | None:
    """Returns the tensor viewed in this shape; None if there is no tensor, or if it would have to be copied."""
    if tensor is None or tensor.shape == shape:
        return tensor
    return tensor.view(shape) if tensor.is_contiguous() else None


@dataclass
class CallBuilder:
    """Builds a call for each operator of a step; `build` must be called in the order of the step. `image_shapes` has
    the shapes of the images that earlier operators read or wrote, by number of elements. `uses_nnpack`: convolutions
    are those of `blocks/convolutions.py` where these are suitable."""

    batch: int
    fuses_bias: bool  # whether a convolution kernel adds its bias itself
    uses_nnpack: bool = False
    image_shapes: dict[int, _Shape] = field(default_factory=dict)

    def build(self, operator: Operator, backward: bool) -> OperatorCall | None:
        """Returns the operator's call; None where its arguments cannot be reconstructed from the profile."""
        dtype = DTYPES_BY_TORCH_NAME.get(operator.dtype)
        if dtype is None:
            return None
        if operator.kind == "convolution":
            return self._convolution(operator, dtype, backward)
        if operator.kind == "matmul" and (groups := round(group_count(operator))):
            return _grouped_product(operator, groups, self._sizes(operator.shape), dtype)
        if operator.kind == "matmul":
            return _product(operator, self._sizes(operator.shape), dtype)
        if operator.kind == "attention":
            return _attention(self._sizes(operator.shape), dtype, backward)
        if operator.name.startswith("max_pool2d_with_indices"):
            return self._pooling(operator, dtype, backward)
        if "batch_norm" in operator.name:
            return self._batch_norm(operator, dtype, backward)
        return _memory_bound(operator, self._sizes(operator.shape), round(operator.bytes.at(self.batch)), dtype)

    def _sizes(self, shape: tuple[BatchPolynomial, ...]) -> _Shape:
        return tuple(round(size.at(self.batch)) for size in shape)

    def _convolution(self, operator: Operator, dtype: torch.dtype, backward: bool) -> OperatorCall | None:
        n, c_in, h, w, c_out, kernel, stride, groups = self._sizes(operator.shape)
        image, filters = (n, c_in, h, w), (c_out, c_in // groups, kernel, kernel)
        owner, bias = object(), self.fuses_bias and bias_bytes(operator, self.batch, backward) > 0
        flops_per_pixel = 2 * n * c_out * prod(filters[1:])
        for gradients in (2, 1) if backward else (1,):
            pixels = operator.flops.at(self.batch) / gradients / flops_per_pixel
            geometry = _padding_and_sides(h, w, kernel, stride, pixels)
            if geometry is None:
                continue
            padding, out = geometry[0], (n, c_out, *geometry[1:])
            self.image_shapes.update({prod(image): image, prod(out): out})
            if self.uses_nnpack and is_suitable((kernel,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), groups):
                if backward:
                    return _nnpack_backward(image, filters, out, padding, dtype, bias, gradients == 2)
                return lambda pool: convolution(
                    pool.latest(image, dtype),
                    pool.random(filters, dtype, owner),
                    pool.random((c_out,), dtype, owner) if bias else None,
                    (padding, padding),
                )
            options = ([stride, stride], [padding, padding], [1, 1], False, [0, 0], groups)
            if not backward:
                return lambda pool: aten.convolution(
                    pool.latest(image, dtype),
                    pool.random(filters, dtype, owner),
                    pool.random((c_out,), dtype, owner) if bias else None,
                    *options,
                )
            output_mask, bias_sizes = [gradients == 2, True, bias], [c_out] if bias else None
            return lambda pool: _largest(
                aten.convolution_backward(
                    pool.latest(out, dtype),
                    pool.saved(image, dtype, owner),
                    pool.random(filters, dtype, owner),
                    bias_sizes,
                    *options,
                    output_mask,
                )
            )
        return None

    def _pooling(self, operator: Operator, dtype: torch.dtype, backward: bool) -> OperatorCall | None:
        (written,), moved, item = self._sizes(operator.shape), operator.bytes.at(self.batch), ITEM_BYTES[operator.dtype]
        # Each maximum is stored with its index, an integer of eight bytes.
        large = written if backward else round((moved - written * (item + 8)) / item)
        small = round((moved - 2 * written * item) / (item + 8)) if backward else written
        image = self.image_shapes.get(large)
        if image is None:
            return None
        for kernel, stride, padding in _WINDOWS:
            height, width = ((side + 2 * padding - kernel) // stride + 1 for side in image[2:])
            out = (*image[:2], height, width)
            if min(height, width) > 0 and prod(out) == small:
                self.image_shapes[small] = out
                window = ([kernel, kernel], [stride, stride], [padding, padding])
                if not backward:
                    return lambda pool: aten.max_pool2d_with_indices(pool.latest(image, dtype), *window)[0]
                return _pooling_backward(image, out, window, dtype)
        return None

    def _batch_norm(self, operator: Operator, dtype: torch.dtype, backward: bool) -> OperatorCall | None:
        image = self.image_shapes.get(self._sizes(operator.shape)[0])
        if image is None:
            return None
        channels, owner = (image[1],), object()

        def run(pool: TensorPool) -> Tensor:
            ones = pool.generated.setdefault((owner, "ones"), torch.ones(channels, device=pool.device))
            x = pool.latest(image, dtype)
            if not backward:
                return aten.native_batch_norm(x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5)[0]
            saved = pool.saved(image, dtype, owner)
            return aten.native_batch_norm_backward(
                x, saved, ones, ones, ones, ones, ones, True, 1e-5, [True, True, True]
            )[0]

        return run


def _padding_and_sides(h: int, w: int, kernel: int, stride: int, pixels: float) -> tuple[int, int, int] | None:
    """Returns the padding with which the result has this number of pixels, and the result's height and width; None if
    no padding smaller than the kernel gives this number."""
    for padding in range(kernel):
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (h, w))
        if min(height, width) > 0 and abs(height * width - pixels) < 0.5:
            return padding, height, width
    return None


def _nnpack_backward(
    image: _Shape, filters: _Shape, out: _Shape, padding: int, dtype: torch.dtype, bias: bool, of_input: bool
) -> OperatorCall:
    """Returns the call of the backward pass of `blocks/convolutions.py`, with the gradient of the input if
    `of_input`."""
    owner = object()

    def run(pool: TensorPool) -> Tensor:
        gradient, weight = pool.latest(out, dtype), pool.random(filters, dtype, owner)
        needed = (of_input, True, bias)
        gradients = convolution_gradients(gradient, pool.saved(image, dtype, owner), weight, (padding, padding), needed)
        return _largest(gradients)

    return run


def _largest(results: Any) -> Tensor:
    return max((result for result in results if result is not None), key=Tensor.numel)


def _pooling_backward(image: _Shape, out: _Shape, window: tuple[list[int], ...], dtype: torch.dtype) -> OperatorCall:
    owner = object()

    def run(pool: TensorPool) -> Tensor:
        saved = pool.saved(image, dtype, owner)
        key = (owner, "indices")
        if key not in pool.generated:
            pool.generated[key] = aten.max_pool2d_with_indices(saved, *window)[1]
        gradient = pool.latest(out, dtype)
        return aten.max_pool2d_with_indices_backward(gradient, saved, *window, [1, 1], False, pool.generated[key])

    return run


def _product(operator: Operator, shape: _Shape, dtype: torch.dtype) -> OperatorCall:
    """Returns the call of a matrix product, whose operands are transposed as its role needs it: a forward product
    multiplies with the transposed weight, and the gradient of a weight sums over the samples."""
    batch, m, n, k = shape
    owner = object()
    if batch > 1:
        return lambda pool: torch.bmm(pool.latest((batch, m, k), dtype), pool.random((batch, k, n), dtype, owner))
    if not operator.computes_gradient and operator.name == "addmm":
        return lambda pool: torch.addmm(
            pool.random((n,), dtype, owner), pool.latest((m, k), dtype), pool.random((n, k), dtype, owner).t()
        )
    if not operator.computes_gradient:
        return lambda pool: pool.latest((m, k), dtype) @ pool.random((n, k), dtype, owner).t()
    if operator.shape[3].linear and not operator.shape[1].linear:
        return lambda pool: pool.latest((k, m), dtype).t() @ pool.saved((k, n), dtype, owner)
    return lambda pool: pool.latest((m, k), dtype) @ pool.random((k, n), dtype, owner)


def _grouped_product(operator: Operator, groups: int, shape: _Shape, dtype: torch.dtype) -> OperatorCall:
    """Returns the call of a grouped product with groups of equal size. The gradient of the matrices sums over rows."""
    _, m, n, k = shape
    sums_over_rows, owner = not operator.shape[1].linear, object()
    sizes = torch.full((groups,), (k if sums_over_rows else m) // groups, dtype=torch.int32)
    sizes[-1] += (k if sums_over_rows else m) - int(sizes.sum())
    ends = sizes.cumsum(0, dtype=torch.int32)

    def run(pool: TensorPool) -> Tensor:
        ends_there = ends.to(pool.device)
        if sums_over_rows:
            left, right = pool.latest((k, m), dtype).t(), pool.saved((k, n), dtype, owner)
        else:
            left, right = pool.latest((m, k), dtype), pool.random((groups, n, k), dtype, owner).transpose(-2, -1)
        return F.grouped_mm(left, right, offs=ends_there)

    return run


def _attention(shape: _Shape, dtype: torch.dtype, backward: bool) -> OperatorCall:
    batch, heads, queries, keys, width, causal = shape
    owner = object()

    def forward(pool: TensorPool, *, graph: bool) -> tuple[list[Tensor], Tensor]:
        sides = [queries, keys, keys]
        inputs = [pool.random((batch, heads, side, width), dtype, (owner, n)) for n, side in enumerate(sides)]
        inputs = [tensor.detach().requires_grad_(graph) for tensor in inputs]
        q, k, v = inputs
        return inputs, F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))

    def run(pool: TensorPool) -> Tensor:
        if not backward:
            return forward(pool, graph=False)[1]
        key = (owner, "graph")
        if key not in pool.generated:
            with torch.enable_grad():
                inputs, pool.generated[key] = forward(pool, graph=True)
            pool.generated.update({(owner, "input", n): tensor for n, tensor in enumerate(inputs)})
        inputs = [pool.generated[(owner, "input", n)] for n in range(3)]
        result = pool.generated[key]
        return torch.autograd.grad(result, inputs, torch.ones_like(result), retain_graph=True)[0]

    return run


def _memory_bound(operator: Operator, shape: _Shape, moved: int, dtype: torch.dtype) -> OperatorCall | None:
    """Returns the call of a sum, a cast or an elementwise operator, whose time depends on the `moved` bytes only; None
    for any other operator."""
    if not shape or not shape[0]:
        return None
    (size, *_), item, name = shape, dtype.itemsize, operator.name
    if name == "threshold_backward":
        return lambda pool: aten.threshold_backward(*pool.latest_and_saved(size, dtype), 0)
    if name == "_to_copy":
        other = torch.float32 if item == 2 else torch.bfloat16
        cast = other if moved != 2 * size * item else dtype
        return lambda pool: pool.latest_of_size(size, dtype).to(cast, copy=True)
    if name == "sum" and moved // item % size == 0:
        return lambda pool: pool.latest((moved // item // size - 1, size), dtype).sum(0, keepdim=True)
    call = getattr(aten, name, None)
    if name in _UNARY:
        return lambda pool: call(pool.latest_of_size(size, dtype))  # type: ignore[misc]
    if name in _BINARY and moved >= (2 if name.endswith("_") else 3) * size * item:
        return lambda pool: call(*pool.latest_and_saved(size, dtype))  # type: ignore[misc]
    return None
