"""Megatron's distributed optimizer: each data rank steps with a range of each flattened parameter, and only there its
gradient is reduced. The ranges are those of the optimizer's own table."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..parts import Part, Region

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class OwnRange:
    """The range of a flattened parameter that this rank steps with, and the optimizer's tensor of it; both None if the
    rank has no part of the parameter."""

    start: int = 0
    end: int = 0
    main: Any = None


def own_ranges() -> dict[int, OwnRange] | None:
    """By the id of a parameter; None if there is no distributed optimizer."""
    optimizers = [
        value
        for value in gc.get_objects()
        if type(value).__name__ == "DistributedOptimizer" and hasattr(value, "model_param_gbuf_map")
    ]
    ranges: dict[int, OwnRange] = {}
    for optimizer in optimizers:
        models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
        shards = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        for parameters, mains in zip(models, shards, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                own = optimizer._get_model_param_range_map(parameter)["param"]
                ranges[id(parameter)] = OwnRange(int(own.start), int(own.end), main)
    return ranges if optimizers else None


def divided_parts(wholes: Sequence[tuple[Box, int, Callable[[], Tensor | None]]], own: OwnRange) -> Iterator[Part]:
    """The parts of a parameter whose weight the rank has whole, and whose gradient it has in its range. Each of
    `wholes` is the box of a contiguous piece, the element of the parameter that it starts at, and its weight."""
    for box, _, weight in wholes:
        yield Part(Region(box=box), weight, lambda: None)
    if own.main is None:
        return
    for box, first, _ in wholes:
        for inner, start, end in boxes_in(box, own.start - first, own.end - first):
            yield Part(Region(box=inner), lambda: None, _gradient_of(own, first + start, first + end, inner))


def _gradient_of(own: OwnRange, start: int, end: int, box: Box) -> Callable[[], Tensor | None]:
    def read() -> Tensor | None:
        gradient = own.main.grad
        if gradient is None:
            return None
        part: Tensor = gradient.detach().reshape(-1)[start - own.start : end - own.start]
        return part.reshape([size for _, size in box])

    return read


def boxes_in(box: Box, start: int, end: int) -> Iterator[tuple[Box, int, int]]:
    """Divides a range of a flattened box of one or two dimensions into boxes: what is left of its first row, whole
    rows, and the beginning of its last one. Yields each with its own range."""
    if len(box) not in (1, 2):
        return
    columns = box[-1][1]
    size = columns * (box[0][1] if len(box) == 2 else 1)
    start, end = max(0, start), min(size, end)
    while start < end:
        row, column = divmod(start, columns)
        rows = 1 if column or end - start < columns else (end - start) // columns
        stop = min(end, start + rows * columns - column)
        width = columns if not column and stop - start >= columns else stop - start
        inner = (box[-1][0] + column, width)
        yield ((inner,) if len(box) == 1 else ((box[0][0] + row, rows), inner)), start, stop
        start = stop
