"""Predicts the memory of the copy from which a rank writes its part of a checkpoint while training goes on
(`checkpoint.asynchronous`). The copy stays allocated between checkpoints: in the memory of the rank on CPUs, in CPU
memory on GPUs.

    copy = sum over parameters of  bytes · (1 + optimizer state per byte) / holders + buffers / holders      copy_bytes

`bytes` are those that the rank has after the tensor and pipeline axes, and `holders` the ranks that have the same part
or divide it: those of the replicate and shard axes, and for what the tensor axis does not divide also those of that. A
region that several ranks hold is written by the one with the fewest bytes so far, so they all write equally much.
"""

from collections.abc import Iterable, Mapping

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
    """The bytes of a rank's copy. `parameters` and `buffer_bytes` are those of the rank's stages, after the tensor
    axis, and `whole` the result of `whole_bytes`. A rank's branches are on no other rank of the tensor axis."""
    tensor = 1 if plan.modules.branches else plan.axes.tensor
    total = buffer_bytes / tensor
    for parameter in parameters:
        is_divided = parameter.bytes < whole.get(parameter.names[0], 0.0)
        state = 1 + (optimizer.state_ratio if parameter.trainable else 0.0)
        total += parameter.bytes * state / (1 if is_divided else tensor)
    return total / plan.data_ranks
