"""What cuDNN's convolutions borrow on GPUs that compute fp32 without tensor cores, while the rows were measured.

With `cudnn.benchmark` off, a 3×3 convolution of stride 1 goes by Winograd's F(4×4, 3×3), in both passes. It borrows
the transformed input, output and filter, of 36 values for every tile of 4×4 outputs and for every filter:

    workspace = 36 · (tiles · (input channels + output channels) + input channels · output channels) · 4 bytes

No number here is fitted, but that cuDNN goes this way was read from the rows of FCN, PSPNet and DeepLabV3. Dilated,
strided and depthwise convolutions go other ways that borrow next to nothing.
"""

from dataclasses import replace
from math import ceil

from torch import nn

from meshwright.profile.values import BatchPolynomial, MemoryChange, ModelProfile, Operator, TraceSegment

TILE, TRANSFORMED = 4, 36
FP32_BYTES = 4


def with_workspaces(found: ModelProfile, model: nn.Module) -> ModelProfile:
    """The profile of the model, with each convolution's workspace taken and given back where it runs."""
    return replace(found, segments=tuple(_stretch(stretch, model) for stretch in found.segments))


def _stretch(stretch: TraceSegment, model: nn.Module) -> TraceSegment:
    wanted = {
        number + 1: size
        for number, operator in enumerate(stretch.operators)
        if (size := _workspace(operator, stretch, model)) is not None
    }
    changes: list[MemoryChange] = []
    for place, change in enumerate(stretch.changes):
        size = wanted.get(change.after_operators)
        if size is not None and change.bytes.linear + change.bytes.constant < 0:
            changes += _borrowed(change.after_operators, size, change.layer)
            del wanted[change.after_operators]
        changes.append(change)
        last = place + 1 == len(stretch.changes) or stretch.changes[place + 1].after_operators != change.after_operators
        if last and change.after_operators in wanted:
            changes += _borrowed(change.after_operators, wanted.pop(change.after_operators), change.layer)
    return replace(stretch, changes=tuple(changes))


def _borrowed(operator: int, size: BatchPolynomial, layer: str) -> list[MemoryChange]:
    back = BatchPolynomial(-size.constant, -size.linear)
    return [MemoryChange(operator, size, "temporary", layer), MemoryChange(operator, back, "temporary", layer)]


def _workspace(operator: Operator, stretch: TraceSegment, model: nn.Module) -> BatchPolynomial | None:
    """In the backward pass the filter's new gradient lies beside it until it is added to the old one."""
    if operator.kind != "convolution" or operator.dtype != "float32":
        return None
    module = model.get_submodule(operator.layer)
    if not isinstance(module, nn.Conv2d) or not _by_winograd(module):
        return None
    count, _, height, width = operator.shape[:4]
    tiles = ceil(height.at(1) / TILE) * ceil(width.at(1) / TILE)
    inputs, outputs = module.in_channels, module.out_channels
    filters = TRANSFORMED * inputs * outputs + (module.weight.numel() if stretch.phase == "backward" else 0)
    images = TRANSFORMED * tiles * (inputs + outputs)
    return BatchPolynomial(FP32_BYTES * (filters + images * count.constant), FP32_BYTES * images * count.linear)


def _by_winograd(conv: nn.Conv2d) -> bool:
    settings = (conv.kernel_size, conv.stride, conv.dilation, conv.groups)
    return settings == ((3, 3), (1, 1), (1, 1), 1)
