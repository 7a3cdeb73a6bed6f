"""HRNet: parallel branches of four resolutions, which exchange their features after every few blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from validation.segmentation.backbones.resnet import basic, bottleneck
from validation.segmentation.layers import ConvNorm, resize

BLOCKS = 4
MODULES = (1, 4, 3)
SMALL_BLOCKS = 2
SMALL_MODULES = (1, 3, 2)


class Exchange(nn.Module):
    """Blocks on each branch; then every branch becomes the sum of all branches, converted to its width and size."""

    def __init__(self, widths: Sequence[int], blocks: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(basic(width, width, 1, 1) for _ in range(blocks))) for width in widths
        )
        self.fuse = nn.ModuleList(
            nn.ModuleList(_conversion(widths, source, to) for source in range(len(widths))) for to in range(len(widths))
        )
        self.relu = nn.ReLU()

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        maps = [branch(feature) for branch, feature in zip(self.branches, features, strict=True)]
        outs = []
        for to, sources in enumerate(self.fuse):
            total: Tensor | int = 0
            for source, path in enumerate(sources.children()):
                part = path(maps[source])
                if source > to:
                    part = resize(part, maps[to].shape[2:])
                total = total + part
            outs.append(self.relu(total))
        return outs


def _conversion(widths: Sequence[int], source: int, to: int) -> nn.Module:
    """Converts features of one branch for another: a 1×1 convolution and enlarging, or 3×3 convolutions that halve."""
    if source == to:
        return nn.Identity()
    if source > to:
        larger = nn.Upsample(scale_factor=2 ** (source - to), mode="bilinear", align_corners=False)
        return nn.Sequential(ConvNorm(widths[source], widths[to], activation=False), larger)
    steps = to - source
    halvings = [ConvNorm(widths[source], widths[source], 3, 2, inplace=False) for _ in range(steps - 1)]
    return nn.Sequential(*halvings, ConvNorm(widths[source], widths[to], 3, 2, activation=False))


class HRNet(nn.Module):
    """Returns the features of its four branches. `small` has fewer blocks and exchanges."""

    def __init__(self, width: int, small: bool = False) -> None:
        super().__init__()
        self.widths = [width * 2**level for level in range(4)]
        blocks, modules = (SMALL_BLOCKS, SMALL_MODULES) if small else (BLOCKS, MODULES)
        self.stem = nn.Sequential(ConvNorm(3, 64, 3, 2), ConvNorm(64, 64, 3, 2))
        self.first = nn.Sequential(*(bottleneck(64 if n == 0 else 256, 64, 1, 1) for n in range(blocks)))
        self.transitions = nn.ModuleList()
        self.stages = nn.ModuleList()
        before = [256]
        for level, count in enumerate(modules, start=2):
            widths = self.widths[:level]
            self.transitions.append(nn.ModuleList(_transition(before, widths, branch) for branch in range(level)))
            self.stages.append(nn.Sequential(*(Exchange(widths, blocks) for _ in range(count))))
            before = widths

    def forward(self, images: Tensor) -> list[Tensor]:
        features = [self.first(self.stem(images))]
        for transition, stage in zip(self.transitions, self.stages, strict=True):
            grown = [
                move(features[min(branch, len(features) - 1)]) for branch, move in enumerate(transition.children())
            ]
            features = stage(grown)
        return features


def _transition(before: Sequence[int], widths: Sequence[int], branch: int) -> nn.Module:
    """The input of a branch in the next stage: a new branch begins with half the size of the coarsest one, and a branch
    of the same width continues unchanged."""
    if branch >= len(before):
        return ConvNorm(before[-1], widths[branch], 3, 2)
    return nn.Identity() if before[branch] == widths[branch] else ConvNorm(before[branch], widths[branch], 3)


class Joined(nn.Module):
    """A head on the concatenation of all branches at the finest size."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Sequence[Tensor]) -> Tensor | list[Tensor]:
        concatenated = torch.cat([resize(feature, features[0].shape[2:]) for feature in features], 1)
        scores: Tensor | list[Tensor] = self.head([concatenated])
        return scores
