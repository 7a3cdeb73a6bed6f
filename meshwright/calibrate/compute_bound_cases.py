"""The shapes of matrix products, attention and convolutions that calibration times: a grid that belongs to no model."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from meshwright.calibrate.case import COMPUTE_BOUND_DTYPES, OperatorCase, TimedCall, random_leaf
from meshwright.cluster.cluster import MeasuredOperator, MemoryLayout

LAYOUTS: tuple[MemoryLayout, ...] = ("contiguous", "channels_last")
_Shape = tuple[int, ...]
_BuildCall = Callable[[_Shape, torch.dtype, torch.device], TimedCall]


def compute_bound_cases(large: bool) -> Iterator[OperatorCase]:
    """Yields the cases for a GPU (`large`) or for a CPU core."""
    yield from _matmuls(large)
    yield from _batched_matmuls(large)
    yield from _grouped_matmuls(large)
    yield from _attentions(large)
    yield from _convolutions(large)


# ---- matrix products


def _matmuls(large: bool) -> Iterator[OperatorCase]:
    # Two grids; the points of the second lie in the middle of the first one's cells.
    grids = ((48, 192, 768, 3072, 12288), (96, 384, 1536, 6144)) if large else ((16, 96, 576, 3456),)
    for sides in grids:
        for shape in product(sides, repeat=3):
            yield _matmul(shape, _linear)
    # A product is slow if the rows of an operand or of the result are no multiple of 16 bytes. How slow depends on
    # which of the three matrices has such rows, so each of the three is timed.
    classes = [(96, 384, 13)]
    if large:
        classes = [(192, 96, 13), (192, 768, 13), (1536, 768, 107)]
        classes += product((1536, 12288), (768, 3072), (10007, 40013))
    for samples, hidden, odd in classes:
        yield _matmul((samples, odd, hidden), _linear)
        yield _matmul((samples, hidden, odd), _input_gradient)
        yield _matmul((odd, hidden, samples), _weight_gradient)
    # Aligned rows: Hopper's TF32 instructions need both operands contiguous along the summed dimension.
    if large:
        for shape in product(grids[0], repeat=3):
            yield _matmul(shape, _input_gradient, "input_gradient")
            yield _matmul(shape, _weight_gradient, "weight_gradient")


def _matmul(
    shape: _Shape,
    build: _BuildCall,
    operator: MeasuredOperator = "matmul",
) -> OperatorCase:
    m, n, k = shape
    moved = m * k + k * n + m * n
    return OperatorCase(operator, shape, partial(build, shape), moved, flops=2 * m * n * k, dtypes=COMPUTE_BOUND_DTYPES)


def _linear(shape: _Shape, dtype: torch.dtype, device: torch.device) -> TimedCall:
    m, n, k = shape
    inputs, weight = (random_leaf(size, dtype, device).detach() for size in ((m, k), (n, k)))
    return lambda: F.linear(inputs, weight)


def _input_gradient(shape: _Shape, dtype: torch.dtype, device: torch.device) -> TimedCall:
    m, n, k = shape
    gradient, weight = (random_leaf(size, dtype, device).detach() for size in ((m, k), (k, n)))
    return lambda: gradient @ weight


def _weight_gradient(shape: _Shape, dtype: torch.dtype, device: torch.device) -> TimedCall:
    m, n, k = shape
    gradient, inputs = (random_leaf(size, dtype, device).detach() for size in ((k, m), (k, n)))
    return lambda: gradient.t() @ inputs


def _batched_matmuls(large: bool) -> Iterator[OperatorCase]:
    shapes: tuple[_Shape, ...] = ((6, 48, 48, 24), (24, 96, 96, 48))
    if large:
        shapes = ((24, 192, 192, 48), (48, 768, 768, 96), (192, 384, 48, 384), (384, 96, 96, 96))
    for shape in shapes:
        b, m, n, k = shape
        moved = b * (m * k + k * n + m * n)
        yield OperatorCase(
            "batched_matmul", shape, partial(_bmm, shape), moved, flops=2 * b * m * n * k, dtypes=COMPUTE_BOUND_DTYPES
        )


def _bmm(shape: _Shape, dtype: torch.dtype, device: torch.device) -> TimedCall:
    b, m, n, k = shape
    left, right = (random_leaf(size, dtype, device).detach() for size in ((b, m, k), (b, k, n)))
    return lambda: torch.bmm(left, right)


def _grouped_matmuls(large: bool) -> Iterator[OperatorCase]:
    """Products of rows with one matrix per group, and their two gradients, as a mixture of experts computes them."""
    shapes: tuple[_Shape, ...] = ((4, 96, 96, 48), (4, 384, 96, 192))
    if large:
        shapes = (
            (8, 1536, 3072, 768), (8, 6144, 1536, 768), (8, 12288, 3072, 768), (8, 12288, 768, 1536),
            (8, 24576, 6144, 1536), (8, 24576, 1536, 6144), (8, 12288, 12288, 3072), (32, 12288, 1536, 768),
            (32, 24576, 768, 1536), (32, 49152, 1536, 3072), (96, 24576, 768, 1536), (96, 49152, 1536, 768),
            (96, 6144, 1536, 768),
        )  # fmt: skip
    for shape in shapes:
        groups, m, n, k = shape
        moved, flops = m * k + groups * k * n + m * n, 2 * m * n * k
        yield OperatorCase(
            "grouped_matmul",
            shape,
            partial(_grouped_product, shape),
            moved,
            2 * moved,
            4 * groups,
            flops,
            2 * flops,
            dtypes=COMPUTE_BOUND_DTYPES,
        )


def _grouped_product(shape: _Shape, dtype: torch.dtype, device: torch.device) -> TimedCall:
    groups, m, n, k = shape
    rows, weights = random_leaf((m, k), dtype, device), random_leaf((groups, n, k), dtype, device)
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=device) * (m // groups)
    return lambda: F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


def _attentions(large: bool) -> Iterator[OperatorCase]:
    shapes: tuple[_Shape, ...] = ((1, 3, 48, 32), (2, 6, 96, 64), (1, 4, 384, 64))
    if large:
        shapes = (
            (2, 10, 384, 64), (6, 20, 768, 64), (24, 10, 896, 64), (48, 10, 192, 64), (8, 24, 1536, 64),
            (24, 20, 768, 64), (32, 12, 256, 64), (4, 16, 512, 64), (12, 16, 1280, 64), (4, 16, 3072, 64),
            (4, 20, 768, 128), (3, 24, 1536, 128), (8, 16, 1280, 128), (6, 24, 3072, 128), (1, 40, 6144, 128),
        )  # fmt: skip
    for shape in shapes:
        batch, heads, sequence, width = shape
        size = batch * heads * sequence * width
        # Two products, each computed for the causal half only. The backward pass has five: the scores again, and the
        # gradients of the values, of the scores, of the queries and of the keys.
        flops = 2 * size * sequence
        build = partial(_attention, shape)
        yield OperatorCase(
            "attention", shape, build, 4 * size, 8 * size, 0, flops, 2.5 * flops, dtypes=COMPUTE_BOUND_DTYPES
        )


def _attention(shape: _Shape, dtype: torch.dtype, device: torch.device) -> TimedCall:
    q, k, v = (random_leaf(shape, dtype, device) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


# ---- convolutions: n, c_in, h, w, c_out, kernel, stride, groups


def _convolutions(large: bool) -> Iterator[OperatorCase]:
    for shape, layout in product(dict.fromkeys(_large_convolutions() if large else _small_convolutions()), LAYOUTS):
        n, c_in, h, w, c_out, kernel, stride, groups = shape
        image, filters = n * c_in * h * w, c_out * c_in // groups * kernel**2
        out = n * c_out * -(-h // stride) * -(-w // stride)
        flops, gradients = 2 * out * c_in // groups * kernel**2, 1 if _is_first(shape) else 2
        yield OperatorCase(
            "convolution",
            shape,
            partial(_convolution, shape, layout),
            image + filters + out,
            gradients * image + 2 * filters + out,
            flops=flops,
            backward_flops=gradients * flops,
            layout=layout,
            dtypes=COMPUTE_BOUND_DTYPES if layout == "contiguous" or not large else COMPUTE_BOUND_DTYPES[1:],
        )


def _is_first(shape: _Shape) -> bool:
    """Whether this is the first layer of a model, recognized by its few input channels. The input of a first layer is
    data and needs no gradient."""
    return shape[1] <= 3


def _convolution(shape: _Shape, layout: MemoryLayout, dtype: torch.dtype, device: torch.device) -> TimedCall:
    n, c_in, h, w, c_out, kernel, stride, groups = shape
    images = random_leaf((n, c_in, h, w), dtype, device, layout).requires_grad_(not _is_first(shape))
    filters = random_leaf((c_out, c_in // groups, kernel, kernel), dtype, device, layout)
    return lambda: F.conv2d(images, filters, stride=stride, padding=kernel // 2, groups=groups)


def _large_convolutions() -> Iterator[_Shape]:
    for n, side in ((20, 160), (80, 192), (160, 256), (320, 160), (6, 384)):
        yield (n, 3, side, side, 64, 7, 2, 1)
        yield (n, 3, side, side, 64, 3, 1, 1)
        yield (n, 64, side, side, 64, 3, 1, 1)
    for n, side, c_in, c_out in (
        (20, 80, 64, 128), (160, 80, 64, 128), (20, 80, 128, 128), (240, 80, 128, 128), (20, 40, 128, 256),
        (160, 40, 128, 256), (20, 40, 256, 256), (240, 40, 256, 256), (20, 20, 256, 512), (240, 20, 256, 512),
        (20, 20, 512, 512), (240, 20, 512, 512), (20, 10, 512, 512), (240, 10, 512, 512), (6, 40, 512, 512),
        (6, 40, 256, 256), (6, 40, 1024, 256), (6, 80, 128, 128), (80, 40, 64, 64), (240, 40, 64, 64),
    ):  # fmt: skip
        yield (n, c_in, side, side, c_out, 3, 1, 1)
    # Filters of one pixel: on rows that are a multiple of 16 bytes (sides that are a multiple of 4) and on others.
    for n, side, c_in, c_out in (
        (40, 40, 64, 64), (240, 48, 64, 64), (40, 40, 64, 256), (240, 48, 64, 256), (40, 40, 256, 64),
        (240, 48, 256, 64), (40, 40, 256, 128), (240, 48, 256, 128), (6, 80, 256, 64), (6, 112, 64, 256),
        (6, 112, 64, 64), (6, 80, 256, 128), (80, 42, 64, 256), (80, 42, 256, 64), (40, 20, 128, 512),
        (240, 24, 128, 512),
        (40, 20, 512, 128), (240, 24, 512, 128), (40, 20, 512, 256), (240, 24, 512, 256), (160, 18, 128, 512),
        (160, 18, 512, 128), (40, 12, 256, 1024), (240, 12, 256, 1024), (40, 12, 1024, 256), (240, 12, 1024, 256),
        (40, 10, 256, 1024), (240, 18, 256, 1024), (240, 18, 1024, 256), (240, 18, 1024, 512), (40, 10, 1024, 256),
        (240, 8, 512, 2048), (240, 8, 2048, 512), (240, 9, 512, 2048), (240, 9, 2048, 512), (40, 5, 512, 2048),
        (6, 40, 1024, 256), (6, 48, 256, 1024), (6, 40, 512, 128), (6, 48, 128, 512), (6, 40, 2048, 512),
        (6, 40, 512, 2048), (6, 40, 2048, 256), (6, 40, 256, 24), (6, 40, 1280, 256),
    ):  # fmt: skip
        yield (n, c_in, side, side, c_out, 1, 1, 1)
    for n, side, channels in ((40, 80, 128), (240, 40, 128), (240, 40, 256), (240, 20, 512), (40, 20, 256)):
        yield (n, channels, side, side, channels, 3, 2, 1)
        yield (n, channels, side, side, 2 * channels, 1, 2, 1)
    yield (40, 64, 80, 80, 128, 3, 2, 1)
    yield (96, 1, 32, 32, 24, 3, 1, 1)
    yield (96, 24, 32, 32, 48, 3, 1, 1)
    yield (48, 3, 160, 160, 640, 16, 16, 1)
    yield (40, 192, 40, 40, 192, 3, 1, 192)
    yield (160, 96, 80, 80, 96, 3, 1, 96)


def _small_convolutions() -> Iterator[_Shape]:
    yield from (
        (6, 1, 24, 24, 12, 5, 1, 1),
        (24, 1, 24, 24, 24, 3, 1, 1),
        (96, 1, 32, 32, 24, 3, 1, 1),
        (6, 3, 32, 32, 24, 3, 1, 1),
        (12, 24, 12, 12, 48, 3, 1, 1),
        (24, 24, 24, 24, 48, 3, 1, 1),
        (12, 48, 20, 20, 48, 3, 1, 1),
        (6, 48, 20, 20, 96, 3, 1, 1),
        (6, 96, 12, 12, 96, 3, 2, 1),
        (6, 96, 12, 12, 48, 1, 1, 1),
        (3, 96, 12, 12, 96, 3, 1, 96),
    )
