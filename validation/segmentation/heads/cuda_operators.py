"""Heads around CUDA operators of their own: CCNet's criss-cross attention and PSANet's masks.

The operators stand here for their shapes: what they take, keep and return is known from the papers; their numbers are
not computed, so these models can be traced and not trained.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from validation.segmentation.era import softmax
from validation.segmentation.heads.attention_heads import ContextHead
from validation.segmentation.heads.context_heads import Classifier
from validation.segmentation.layers import ConvNorm, resize

MASK = 97  # cells a side of PSANet's masks


class _Shaped(torch.autograd.Function):
    """Takes tensors and returns one of the given shape; with `keeps`, they are saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], keeps: bool, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*(given if keeps else ()))
        ctx.shapes = [tensor.shape for tensor in given]
        return given[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, None, *(grad.new_zeros(shape) for shape in ctx.shapes))


def _shaped(shape: tuple[int, ...], keeps: bool, *given: Tensor) -> Tensor:
    result: Tensor = _Shaped.apply(shape, keeps, *given)
    return result


class CrissCross(nn.Module):
    """Every position attends to those of its row and column, twice over."""

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
            weights = softmax(_shaped((count, height + width - 1, height, width), True, query, key), 1)
            x = self.scale * _shaped(tuple(x.shape), True, weights, value) + x
        return x


def criss_cross_head(inputs: int, channels: int, classes: int) -> ContextHead:
    return ContextHead(inputs, channels, classes, CrissCross(channels))


def _masks(channels: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(channels, channels), nn.Conv2d(channels, MASK**2, 1, bias=False))


class PointwiseHead(nn.Module):
    """PSANet: every position collects from all others and distributes to them, by masks that it predicts, at half
    the size."""

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
        found = _shaped((count, small[0] * small[1], *small), False, masks(x))
        found = softmax(found, 1)
        return torch.bmm(x.flatten(2), found.flatten(2)).view(count, channels, *small) * 1.0

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[3]
        collected = self._attended(self.collect(x), self.collect_masks)
        distributed = self._attended(self.distribute(x), self.distribute_masks)
        out = resize(self.project(torch.cat([collected, distributed], 1)), x.shape[2:])
        scores: Tensor = self.classifier(self.joined(torch.cat([x, out], 1)))
        return scores
