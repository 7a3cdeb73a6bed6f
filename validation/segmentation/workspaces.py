"""Workspaces of cuDNN's convolutions on GPUs that compute fp32 without tensor cores, when the rows were measured.

With `cudnn.benchmark` off, a 3×3 convolution of stride 1 uses Winograd's algorithm F(4×4, 3×3), in both passes. Its
workspace holds the transformed input, output and filters: 36 values for every tile of 4×4 outputs and every filter.

    workspace = 36 · (tiles · (input channels + output channels) + input channels · output channels) · 4 bytes

No number here is fitted, but that cuDNN uses this algorithm was concluded from the rows of FCN, PSPNet and DeepLabV3.
Dilated, strided and depthwise convolutions use other algorithms, which need almost no workspace.
"""

from dataclasses import replace
from math import ceil

from torch import nn

from meshwright.profile.values import BatchPolynomial, MemoryChange, ModelProfile, Operator, TraceSegment

TILE, TRANSFORMED = 4, 36
FP32_BYTES = 4


def with_workspaces(profile: ModelProfile, model: nn.Module) -> ModelProfile:
    """The profile of the model, in which each convolution allocates its workspace when it begins and frees it when it
    ends."""
    return replace(profile, segments=tuple(_segment_with_workspaces(segment, model) for segment in profile.segments))


def _segment_with_workspaces(segment: TraceSegment, model: nn.Module) -> TraceSegment:
    workspaces = {
        number + 1: size
        for number, operator in enumerate(segment.operators)
        if (size := _workspace(operator, segment, model)) is not None
    }
    changes: list[MemoryChange] = []
    for index, change in enumerate(segment.changes):
        size = workspaces.get(change.after_operators)
        if size is not None and change.bytes.linear + change.bytes.constant < 0:
            changes += _allocated_and_freed(change.after_operators, size, change.layer)
            del workspaces[change.after_operators]
        changes.append(change)
        is_last = (
            index + 1 == len(segment.changes) or segment.changes[index + 1].after_operators != change.after_operators
        )
        if is_last and change.after_operators in workspaces:
            size = workspaces.pop(change.after_operators)
            changes += _allocated_and_freed(change.after_operators, size, change.layer)
    return replace(segment, changes=tuple(changes))


def _allocated_and_freed(operator: int, size: BatchPolynomial, layer: str) -> list[MemoryChange]:
    freed = BatchPolynomial(-size.constant, -size.linear)
    return [MemoryChange(operator, size, "temporary", layer), MemoryChange(operator, freed, "temporary", layer)]


def _workspace(operator: Operator, segment: TraceSegment, model: nn.Module) -> BatchPolynomial | None:
    """The bytes of the operator's workspace; None if it is no convolution by Winograd's algorithm. The backward pass
    also allocates a new gradient of the filter, until it is added to the existing one."""
    if operator.kind != "convolution" or operator.dtype != "float32":
        return None
    module = model.get_submodule(operator.layer)
    if not isinstance(module, nn.Conv2d) or not _uses_winograd(module):
        return None
    count, _, height, width = operator.shape[:4]
    tiles = ceil(height.at(1) / TILE) * ceil(width.at(1) / TILE)
    inputs, outputs = module.in_channels, module.out_channels
    filters = TRANSFORMED * inputs * outputs + (module.weight.numel() if segment.phase == "backward" else 0)
    images = TRANSFORMED * tiles * (inputs + outputs)
    return BatchPolynomial(FP32_BYTES * (filters + images * count.constant), FP32_BYTES * images * count.linear)


def _uses_winograd(conv: nn.Conv2d) -> bool:
    settings = (conv.kernel_size, conv.stride, conv.dilation, conv.groups)
    return settings == ((3, 3), (1, 1), (1, 1), 1)
