"""Segmenter's heads. In `MaskHead`, learned tokens of the classes go through two more layers together with the tokens
of the image, and the score of a position is its product with each of them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.backbones.transformer import Block
from validation.segmentation.layers import to_map, to_tokens

LAYERS, DROPOUT, STOCHASTIC_DEPTH = 2, 0.1, 0.1


class MaskHead(nn.Module):
    """The head of Segmenter-Mask, on the last of the backbone's features."""

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.project = nn.Linear(width, width)
        self.tokens = nn.Parameter(torch.zeros(1, classes, width))
        self.layers = nn.Sequential(*(Block(width, heads, DROPOUT, STOCHASTIC_DEPTH) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.position_projection = nn.Linear(width, width, bias=False)
        self.class_projection = nn.Linear(width, width, bias=False)
        self.masks = nn.LayerNorm(classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[-1]
        tokens = self.project(to_tokens(x))
        tokens = torch.cat([tokens, self.tokens.expand(len(tokens), -1, -1)], 1)
        tokens = self.norm(self.layers(tokens))
        positions = F.normalize(self.position_projection(tokens[:, : -self.classes]), dim=2, p=2)
        class_tokens = F.normalize(self.class_projection(tokens[:, -self.classes :]), dim=2, p=2)
        return to_map(self.masks(positions @ class_tokens.transpose(1, 2)), x.shape[2:])


class LinearHead(nn.Module):
    """A score for each class at every position of the last features."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        scores: Tensor = self.classifier(features[-1])
        return scores
