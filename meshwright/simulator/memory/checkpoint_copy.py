"""Predicts the memory of the copy from which a rank writes its part of a checkpoint while training goes on
(`checkpoint.asynchronous`). The copy stays allocated between checkpoints: in the memory of the rank on CPUs, in CPU
memory on GPUs.

    copy   = (sum over parameters of  pieces · aligned(piece) · (1 + optimizer state per byte)
              + aligned(4) · numbers in the optimizer's state  + buffers) / ranks of the stage       copy_bytes
    pieces = bytes / piece                     into which the tensor, expert and shard axes divide the parameter
    aligned(b) = b, rounded up to a multiple of 64 bytes, at which every piece begins                _aligned

`bytes` are those of the whole parameter. However the axes divide or repeat it among the ranks of its pipeline stage,
they write it once, together: a region that several ranks hold is written by the one with the fewest bytes so far.
"""

import math
from collections.abc import Iterable, Mapping

from meshwright.dtypes import PIECE_ALIGNMENT
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile, Parameter


def whole_bytes(profile: ModelProfile) -> dict[str, float]:
    """The bytes of each parameter of the whole model, by name."""
    return {parameter.names[0]: float(parameter.bytes) for parameter in profile.parameters}


def copy_bytes(
    parameters: Iterable[Parameter],
    buffer_bytes: float,
    plan: Plan,
    optimizer: OptimizerCost,
    whole: Mapping[str, float],
) -> float:
    """The bytes of a rank's copy. `parameters` and `buffer_bytes` are those of the rank's stages, and `whole` is what
    `whole_bytes` returns. A branch of the model is on one rank of the tensor axis, so with branches that axis is left
    out."""
    ranks = plan.world_size // plan.axes.pipeline
    if plan.modules.branches:
        ranks //= plan.axes.tensor
    total = buffer_bytes
    for parameter in parameters:
        state = 1 + (optimizer.state_ratio if parameter.trainable else 0.0)
        piece_bytes = max(parameter.bytes / plan.axes.shard, 1.0)
        pieces = whole.get(parameter.names[0], float(parameter.bytes)) / piece_bytes
        total += pieces * _aligned(piece_bytes) * state
        if parameter.trainable:
            total += optimizer.state_numbers * _aligned(4)
    return total / ranks


def _aligned(size_bytes: float) -> int:
    return math.ceil(size_bytes / PIECE_ALIGNMENT) * PIECE_ALIGNMENT
