"""ResNeSt that keeps its resolution (D8): the 3×3 convolution of a bottleneck has two halves, weighted by channel."""

import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.backbones.resnet import BLOCKS, DILATIONS, STRIDES, Residual
from validation.segmentation.era import softmax
from validation.segmentation.layers import ConvNorm


class SplitAttention(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        inner = max(width * 2 // 4, 32)
        self.conv = ConvNorm(width, 2 * width, 3, 1, dilation, groups=2)
        self.narrow = nn.Conv2d(width, inner, 1)
        self.norm = nn.BatchNorm2d(inner)
        self.relu = nn.ReLU(inplace=True)
        self.wide = nn.Conv2d(inner, 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        count, channels, height, width = x.shape
        halves = x.view(count, 2, channels // 2, height, width)
        mean = F.adaptive_avg_pool2d(halves.sum(dim=1), 1)
        weights = self.wide(self.relu(self.norm(self.narrow(mean))))
        weights = softmax(weights.view(count, 1, 2, channels // 2).transpose(1, 2), 1).reshape(count, -1)
        return (halves * weights.view(count, 2, channels // 2, 1, 1)).sum(dim=1).contiguous()


def _bottleneck(inputs: int, width: int, stride: int, dilation: int) -> Residual:
    """A bottleneck whose strides, in the path and in the shortcut, are average pooling."""
    outputs = 4 * width
    smaller = [nn.AvgPool2d(3, stride, 1)] if stride > 1 else []
    path = nn.Sequential(
        ConvNorm(inputs, width), SplitAttention(width, dilation), *smaller, ConvNorm(width, outputs, activation=False)
    )
    if inputs == outputs and stride == 1:
        return Residual(path, nn.Identity())
    pool = [nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)] if stride > 1 else []
    return Residual(path, nn.Sequential(*pool, ConvNorm(inputs, outputs, activation=False)))


class ResNeSt(nn.Module):
    """Returns the features of its four stages."""

    def __init__(self, depth: int = 101, output_stride: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(3, 64, 3, 2), ConvNorm(64, 64, 3), ConvNorm(64, 128, 3), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.ModuleList()
        inputs = 128
        settings = zip(
            BLOCKS[depth], STRIDES[output_stride], DILATIONS[output_stride], (64, 128, 256, 512), strict=True
        )
        for count, stride, dilation, width in settings:
            first = _bottleneck(inputs, width, stride, max(1, dilation // 2))
            inputs = 4 * width
            rest = (_bottleneck(inputs, width, 1, dilation) for _ in range(count - 1))
            self.stages.append(nn.Sequential(first, *rest))
        self.widths = [256, 512, 1024, 2048]

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.stem(images)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features
