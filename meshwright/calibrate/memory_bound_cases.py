"""The shapes of memory-bound operators that calibration times: norms, pooling, losses, sums, copies, embedding lookups
and optimizer steps."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.calibrate.case import OperatorCase, TimedCall, images_case, random_leaf
from meshwright.calibrate.compute_bound_cases import LAYOUTS


def memory_bound_cases(large: bool) -> Iterator[OperatorCase]:
    """Yields the cases for a GPU (`large`) or for a CPU core."""
    yield from _norms(large)
    yield from _images(large)
    yield from _rows(large)
    yield from _elementwise(large)
    yield from _embeddings(large)
    yield from _optimizers(large)


# ---- norms


def _norms(large: bool) -> Iterator[OperatorCase]:
    shapes = ((96, 192), (1536, 768), (6144, 1536), (24576, 768), (12288, 3072), (49152, 1536))
    for rows, columns in shapes if large else ((24, 96), (192, 384), (768, 768)):
        size = rows * columns
        yield OperatorCase("norm", (rows, columns), partial(_layer_norm, rows, columns), 2 * size, 3 * size)
    # A GPU assigns each channel of contiguous images to one thread block: the number of channels matters as much as
    # their size.
    batches = [(24, 48, 24), (40, 64, 80), (160, 64, 80), (240, 64, 112), (40, 256, 10), (40, 256, 40), (200, 256, 40)]
    batches += [(6, 128, 80), (200, 128, 40), (6, 256, 40), (6, 256, 80), (6, 1024, 40), (200, 1024, 12)]
    batches += [(40, 512, 20), (200, 512, 24), (6, 512, 40), (6, 2048, 40), (200, 2048, 8)]
    for (n, c, side), layout in product(batches if large else ((6, 12, 12), (24, 24, 24)), LAYOUTS):
        yield images_case("norm", (n, c, side, side), layout, partial(_batch_norm, c), 2, 3)


def _layer_norm(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    x, weight = random_leaf((rows, columns), dtype, device), random_leaf((columns,), dtype, device)
    return lambda: F.layer_norm(x, (columns,), weight, weight)


def _batch_norm(channels: int, images: Tensor) -> TimedCall:
    weight = torch.ones(channels, device=images.device, requires_grad=True)
    mean, variance = (torch.zeros(channels, device=images.device) for _ in range(2))
    return lambda: F.batch_norm(images, mean, variance, weight, weight, training=True)


# ---- pooling, and adding the bias of a convolution


def _images(large: bool) -> Iterator[OperatorCase]:
    shapes = ((24, 48, 24), (80, 512, 20), (20, 64, 160), (80, 256, 40), (80, 64, 160), (240, 64, 160))
    small = ((6, 12, 12), (24, 24, 24), (48, 48, 24))
    for (n, c, side), layout in product(shapes if large else small, LAYOUTS):
        shape = (n, c, side, side)
        # A quarter of the pixels remain, each with its index as an integer of eight bytes.
        yield images_case("pooling", shape, layout, _max_pool, 1.25, 2.25, 2.0)
        if large:  # on a CPU the convolution kernel adds the bias itself
            yield images_case("bias", shape, layout, partial(_bias, c), 2, 1)


def _max_pool(images: Tensor) -> TimedCall:
    return lambda: F.max_pool2d(images, 2)


def _bias(channels: int, images: Tensor) -> TimedCall:
    bias = torch.zeros(channels, dtype=images.dtype, device=images.device, requires_grad=True)
    detached = images.detach()
    return lambda: detached + bias.view(1, -1, 1, 1)


# ---- rows of numbers


def _rows(large: bool) -> Iterator[OperatorCase]:
    shapes = ((96, 192), (3072, 1000), (12288, 3072), (3072, 30011), (12288, 40013))
    for rows, columns in shapes if large else ((24, 12), (96, 96), (384, 768)):
        size, shape = rows * columns, (rows, columns)
        # On a GPU the backward pass of softmax is two operators, that of log_softmax one.
        yield OperatorCase("softmax", shape, partial(_softmax, shape), 2 * size, 3 * size)
        yield OperatorCase("log_softmax", shape, partial(_log_softmax, shape), 2 * size, 3 * size)
        yield OperatorCase("loss", shape, partial(_negative_log_likelihood, shape), size, 2 * size, 8 * rows)
    sums = ((96, 192), (1536, 768), (12288, 768), (12288, 3072), (24576, 6144))
    for shape in sums if large else ((24, 96), (96, 768)):
        yield OperatorCase("reduction", shape, partial(_sum, shape), shape[0] * shape[1])


def _softmax(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> TimedCall:
    scores = random_leaf(shape, dtype, device)
    return lambda: F.softmax(scores, dim=1)


def _log_softmax(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> TimedCall:
    scores = random_leaf(shape, dtype, device)
    return lambda: F.log_softmax(scores, dim=1)


def _negative_log_likelihood(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> TimedCall:
    scores = random_leaf(shape, dtype, device)
    targets = torch.randint(shape[1], (shape[0],), device=device)
    return lambda: F.nll_loss(scores, targets)


def _sum(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> TimedCall:
    """Returns a function that sums over the rows, as the gradient of a bias does."""
    values = random_leaf(shape, dtype, device).detach()
    return lambda: values.sum(0)


def _elementwise(large: bool) -> Iterator[OperatorCase]:
    powers = (10, 14, 18, 21, 24, 27) if large else (8, 12, 15, 18, 20)
    for elements in (3 * 2**power for power in powers):
        yield OperatorCase("elementwise", (elements,), partial(_relu, elements), 2 * elements)
        yield OperatorCase("copy", (elements,), partial(_transposing_copy, elements), 2 * elements)
        yield OperatorCase("gelu", (elements,), partial(_gelu, elements), 2 * elements, 3 * elements)
        if large:  # on a CPU dropout is several operators
            yield OperatorCase(
                "dropout", (elements,), partial(_dropout, elements), 2 * elements, 2 * elements, elements
            )
            widen = partial(_widen, elements)
            # A 32-bit result counts as two 16-bit elements.
            yield OperatorCase("widen", (elements,), widen, 3 * elements, dtypes=("bf16",))


def _relu(elements: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    x = random_leaf((elements,), dtype, device).detach()
    return lambda: F.relu(x)


def _gelu(elements: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    x = random_leaf((elements,), dtype, device)
    return lambda: F.gelu(x)


def _dropout(elements: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    x = random_leaf((elements,), dtype, device)
    return lambda: F.dropout(x, 0.1)


def _widen(elements: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    x = random_leaf((elements,), dtype, device).detach()
    return lambda: x.float()


def _transposing_copy(elements: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    """Returns a function that copies a tensor with heads and tokens exchanged, as attention needs it."""
    x = random_leaf((elements // 768, 12, 64), dtype, device).detach().transpose(0, 1)
    return lambda: x.contiguous()


def _embeddings(large: bool) -> Iterator[OperatorCase]:
    shapes = ((12288, 384, 768), (49152, 768, 6144), (30720, 1024, 12288), (3072, 768, 12288))
    for rows, columns, lookups in shapes if large else ((768, 96, 192), (6144, 192, 768)):
        size = (rows + lookups) * columns
        build = partial(_embedding, rows, columns, lookups)
        yield OperatorCase("embedding", (rows, columns, lookups), build, size, size, 8 * lookups)


def _embedding(rows: int, columns: int, lookups: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    table = random_leaf((rows, columns), dtype, device)
    indices = torch.randint(rows, (lookups,), device=device)
    return lambda: F.embedding(indices, table)


# ---- optimizer steps


def _optimizers(large: bool) -> Iterator[OperatorCase]:
    shapes = ((12, 3 * 2**10), (96, 3 * 2**15), (24, 3 * 2**20), (24, 3 * 2**22))
    for (tensors, elements), state in product(shapes if large else ((12, 768), (12, 49152), (3, 786432)), (1, 2)):
        # Weight, gradient and state are read; weight and state are written.
        moved = (3 + 2 * state) * tensors * elements
        build = partial(_optimizer, tensors, elements, state)
        yield OperatorCase("optimizer", (tensors, elements, state), build, moved, dtypes=("fp32",))


def _optimizer(tensors: int, elements: int, state: int, dtype: torch.dtype, device: torch.device) -> TimedCall:
    weights = [random_leaf((elements,), dtype, device) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights) if state == 2 else torch.optim.SGD(weights, lr=0.01, momentum=0.9)

    def step() -> Tensor:
        optimizer.step()
        return weights[0]

    return step
