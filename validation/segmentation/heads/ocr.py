"""OCRNet: the features of each class are pooled by the scores of a first head, and every position attends to them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from validation.segmentation.era import softmax
from validation.segmentation.heads.attention_heads import SelfAttention
from validation.segmentation.heads.context_heads import Classifier, FCNHead
from validation.segmentation.layers import ConvNorm, resize


class ObjectContextHead(nn.Module):
    """`coarse` is the first head. It runs twice: for its own loss, and for the classes of this head. With `join` the
    input is the concatenation of all features at the finest size, else the last feature."""

    def __init__(self, coarse: FCNHead, inputs: int, classes: int, channels: int = 512, join: bool = True) -> None:
        super().__init__()
        self.join = join
        self.coarse = coarse
        self.before = ConvNorm(inputs, channels, 3)
        self.attention = SelfAttention(channels, channels, 256, channels)
        self.joined = ConvNorm(2 * channels, channels)
        self.classifier = Classifier(channels, classes)

    def _input(self, features: Sequence[Tensor]) -> Tensor:
        if not self.join:
            return features[-1]
        return torch.cat([resize(feature, features[0].shape[2:]) for feature in features], 1)

    def first(self, features: Sequence[Tensor]) -> Tensor:
        scores: Tensor = self.coarse([self._input(features)] if self.join else features)
        return scores

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        scores = self.first(features)
        x = self.before(self._input(features))
        weights = softmax(scores.flatten(2), 2)
        context = torch.matmul(weights, x.flatten(2).permute(0, 2, 1)).permute(0, 2, 1).contiguous().unsqueeze(3)
        attended = self.attention(x, context)
        final: Tensor = self.classifier(self.joined(torch.cat([attended, x], 1)))
        return final


class First(nn.Module):
    """The first head of a pair, which has its own loss; its weights belong to the second head."""

    def __init__(self, second: ObjectContextHead) -> None:
        super().__init__()
        self.second = second

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        return self.second.first(features)
