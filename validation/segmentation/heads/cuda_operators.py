"""Heads that use custom CUDA operators: CCNet's criss-cross attention and PSANet's masks.

Only the shapes of these operators are modelled: which tensors they take, save and return is known from the papers.
Their values are not computed, so these models can be traced but not trained.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from validation.segmentation.era import softmax
from validation.segmentation.heads.attention_heads import ContextHead
from validation.segmentation.heads.context_heads import Classifier
from validation.segmentation.layers import ConvNorm, resize

MASK_SIDE = 97  # cells per side of PSANet's masks


class _OutputOfShape(torch.autograd.Function):
    """Takes `inputs` and returns a tensor of the given shape; `saves_inputs` saves them for the backward pass."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], saves_inputs: bool, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*(inputs if saves_inputs else ()))
        ctx.shapes = [tensor.shape for tensor in inputs]
        return inputs[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, None, *(grad.new_zeros(shape) for shape in ctx.shapes))


def _output_of_shape(shape: tuple[int, ...], saves_inputs: bool, *inputs: Tensor) -> Tensor:
    result: Tensor = _OutputOfShape.apply(shape, saves_inputs, *inputs)
    return result


class CrissCross(nn.Module):
    """Every position attends to the positions of its row and column. This is done twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Conv2d(channels, channels // 8, 1)
        self.key = nn.Conv2d(channels, channels // 8, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            query, key, value = self.query(x), self.key(x), self.value(x)
            count, _, height, width = x.shape
            weights = softmax(_output_of_shape((count, height + width - 1, height, width), True, query, key), 1)
            x = self.scale * _output_of_shape(tuple(x.shape), True, weights, value) + x
        return x


def criss_cross_head(inputs: int, channels: int, classes: int) -> ContextHead:
    return ContextHead(inputs, channels, classes, CrissCross(channels))


def _masks(channels: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(channels, channels), nn.Conv2d(channels, MASK_SIDE**2, 1, bias=False))


class PointwiseHead(nn.Module):
    """PSANet: every position collects from all others and distributes to them, weighted by masks that it predicts, on
    maps of half the size."""

    def __init__(self, inputs: int, channels: int, classes: int) -> None:
        super().__init__()
        self.collect, self.distribute = ConvNorm(inputs, channels), ConvNorm(inputs, channels)
        self.collect_masks, self.distribute_masks = _masks(channels), _masks(channels)
        self.project = ConvNorm(2 * channels, inputs)
        self.joined = ConvNorm(2 * inputs, channels, 3)
        self.classifier = Classifier(channels, classes)

    def _attended(self, x: Tensor, masks: nn.Module) -> Tensor:
        height, width = x.shape[2:]
        small = ((height + 1) // 2, (width + 1) // 2)
        x = resize(x, small)
        count, channels = x.shape[:2]
        weights = _output_of_shape((count, small[0] * small[1], *small), False, masks(x))
        weights = softmax(weights, 1)
        return torch.bmm(x.flatten(2), weights.flatten(2)).view(count, channels, *small) * 1.0

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[3]
        collected = self._attended(self.collect(x), self.collect_masks)
        distributed = self._attended(self.distribute(x), self.distribute_masks)
        out = resize(self.project(torch.cat([collected, distributed], 1)), x.shape[2:])
        scores: Tensor = self.classifier(self.joined(torch.cat([x, out], 1)))
        return scores
