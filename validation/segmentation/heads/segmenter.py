"""Segmenter's head: learned tokens for the classes go through two more layers with the image's, and every place is
scored by its product with each of them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.backbones.transformer import Block
from validation.segmentation.layers import to_map, to_tokens

LAYERS, DROP, PATH = 2, 0.1, 0.1


class MaskHead(nn.Module):
    """Works on the last of the backbone's features."""

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.project = nn.Linear(width, width)
        self.tokens = nn.Parameter(torch.zeros(1, classes, width))
        self.layers = nn.Sequential(*(Block(width, heads, DROP, PATH) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.places = nn.Linear(width, width, bias=False)
        self.scored = nn.Linear(width, width, bias=False)
        self.masks = nn.LayerNorm(classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[-1]
        tokens = self.project(to_tokens(x))
        tokens = torch.cat([tokens, self.tokens.expand(len(tokens), -1, -1)], 1)
        tokens = self.norm(self.layers(tokens))
        places = F.normalize(self.places(tokens[:, : -self.classes]), dim=2, p=2)
        scored = F.normalize(self.scored(tokens[:, -self.classes :]), dim=2, p=2)
        return to_map(self.masks(places @ scored.transpose(1, 2)), x.shape[2:])


class LinearHead(nn.Module):
    """A score for each class at every place of the last features."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        scores: Tensor = self.classifier(features[-1])
        return scores
