"""Heads whose weights depend on the content of the whole image: EncNet, APCNet and DMNet."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.era import softmax
from validation.segmentation.heads.context_heads import Classifier
from validation.segmentation.layers import ConvNorm, resize

SCALES = (1, 2, 3, 6)
FILTERS = (1, 3, 5, 7)


class AdaptiveContext(nn.Module):
    """APCNet's module for one scale: every position receives a sum over the cells of a pooled grid, with its own
    weights."""

    def __init__(self, scale: int, inputs: int, channels: int) -> None:
        super().__init__()
        self.scale = scale
        self.pooled = ConvNorm(inputs, channels)
        self.reduced = ConvNorm(inputs, channels)
        self.whole = ConvNorm(channels, channels)
        self.affinity = nn.Conv2d(channels, scale**2, 1)
        self.residual = ConvNorm(channels, channels)
        self.fusion = ConvNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        cells = self.pooled(F.adaptive_avg_pool2d(x, self.scale))
        x = self.reduced(x)
        count, channels, height, width = x.shape
        cells = cells.view(count, channels, -1).permute(0, 2, 1).contiguous()
        whole = resize(self.whole(F.adaptive_avg_pool2d(x, 1)), x.shape[2:])
        affinity = self.affinity(x + whole).permute(0, 2, 3, 1).reshape(count, -1, self.scale**2)
        context = torch.matmul(torch.sigmoid(affinity), cells)
        context = context.permute(0, 2, 1).contiguous().view(count, channels, height, width)
        result: Tensor = self.fusion(F.relu(self.residual(context) + x))
        return result


class DynamicConvolution(nn.Module):
    """DMNet's module for one filter size: a depthwise convolution whose filters are pooled from its input."""

    def __init__(self, side: int, inputs: int, channels: int) -> None:
        super().__init__()
        self.side = side
        self.filters = nn.Conv2d(inputs, channels, 1)
        self.reduced = ConvNorm(inputs, channels)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.fusion = ConvNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        filters = self.filters(F.adaptive_avg_pool2d(x, self.side))
        x = self.reduced(x)
        count, channels, height, width = x.shape
        before = (self.side - 1) // 2
        after = self.side - 1 - before
        padded = F.pad(x.view(1, count * channels, height, width), (before, after, before, after))
        filters = filters.view(count * channels, 1, self.side, self.side)
        out = F.conv2d(padded, filters, groups=count * channels).view(count, channels, height, width)
        result: Tensor = self.fusion(self.relu(self.norm(out)))
        return result


class SideBySideHead(nn.Module):
    """One convolution on the concatenation of the input with the results of several context modules."""

    def __init__(self, inputs: int, channels: int, classes: int, dynamic: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            DynamicConvolution(side, inputs, channels) if dynamic else AdaptiveContext(side, inputs, channels)
            for side in (FILTERS if dynamic else SCALES)
        )
        self.joined = ConvNorm(inputs + 4 * channels, channels, 3)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[3]
        scores: Tensor = self.classifier(self.joined(torch.cat([x, *(part(x) for part in self.parts)], 1)))
        return scores


class Encoding(nn.Module):
    """EncNet's encoding: distances of every position to learned codewords, weighted by a softmax over the codewords and
    summed over the image."""

    def __init__(self, channels: int, codes: int) -> None:
        super().__init__()
        self.codewords = nn.Parameter(torch.zeros(codes, channels))
        self.scale = nn.Parameter(torch.zeros(codes))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2).contiguous()
        count, positions, channels = x.shape
        codes = self.codewords.shape[0]
        codewords = self.codewords.view(1, 1, codes, channels)

        def differences() -> Tensor:
            return x.unsqueeze(2).expand(count, positions, codes, channels) - codewords

        distances = self.scale.view(1, 1, codes) * differences().pow(2).sum(dim=3)
        weights = softmax(distances, 2)
        return (weights.unsqueeze(3) * differences()).sum(dim=1)


class EncodingHead(nn.Module):
    """EncNet: channels of the last feature are weighted by the encoding of the image."""

    def __init__(self, inputs: int, channels: int, classes: int, codes: int = 32) -> None:
        super().__init__()
        self.before = ConvNorm(inputs, channels, 3)
        self.project = ConvNorm(channels, channels)
        self.encoding = Encoding(channels, codes)
        self.norm = nn.BatchNorm1d(codes)
        self.gate = nn.Linear(channels, channels)
        self.presence = nn.Linear(channels, classes)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = self.before(features[-1])
        encoding = F.relu(self.norm(self.encoding(self.project(x))), inplace=True).mean(dim=1)
        gate = torch.sigmoid(self.gate(encoding))
        out = F.relu(x + x * gate.unsqueeze(-1).unsqueeze(-1))
        scores: Tensor = self.classifier(out)
        return scores + 0 * self.presence(encoding).sum()
