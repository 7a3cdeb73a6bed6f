"""torchvision's models for classification and segmentation, their losses and metrics, and pictures made in memory.

Picture i is a function of (seed, split, i), made when it is asked for, so a data set of any length takes no memory.
What a class looks like depends on the class alone: it is the same in every split and under every seed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.call import load
from meshwright.data.order import derive
from meshwright.errors import InputError

SPLITS = ("train", "test")
IGNORED = 255  # what PASCAL VOC marks the edges of objects with
HIDDEN = 4096  # features between VGG's fully connected layers
PATCHES = 4  # of a class's pattern, in each direction
OBJECTS = 3  # in a scene

# ---- models


def vgg16(classes: int = 1000, hidden: int = HIDDEN, **options: Any) -> nn.Module:
    """`hidden`: features between the fully connected layers, fewer of them for small machines. `options` are
    torchvision's, such as `dropout`."""
    return _vgg("vgg16", classes, hidden, **options)


def vgg19(classes: int = 1000, hidden: int = HIDDEN, **options: Any) -> nn.Module:
    return _vgg("vgg19", classes, hidden, **options)


def resnet18(classes: int = 1000, **options: Any) -> nn.Module:
    return _torchvision("resnet18", classes, **options)


def resnet50(classes: int = 1000, **options: Any) -> nn.Module:
    return _torchvision("resnet50", classes, **options)


def deeplab(classes: int = 21, auxiliary: bool = False, zero_init_residual: bool = False) -> nn.Module:
    """DeepLabV3 on ResNet-101. With `auxiliary`, a second head learns from an earlier layer (`SegmentationLoss`). With
    `zero_init_residual`, which torchvision's ResNets take and this one does not, blocks add nothing to begin with."""
    made: Any = _torchvision("segmentation.deeplabv3_resnet101", classes, weights_backbone=None, aux_loss=auxiliary)
    if zero_init_residual:
        for name, weight in made.backbone.named_parameters():
            if name.endswith("bn3.weight"):
                nn.init.zeros_(weight)
    return DeepLab(made)


class DeepLab(nn.Module):
    """torchvision's model, with its names for the weights, that returns scores (batch, classes, height, width)
    rather than a dict of them; while an auxiliary head is trained, the pair of both heads' scores."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.backbone = made.backbone
        self.classifier = made.classifier
        self.aux_classifier = made.aux_classifier

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        size = images.shape[-2:]
        features = self.backbone(images)
        scores = _enlarged(self.classifier(features["out"]), size)
        if self.aux_classifier is None or not self.training:
            return scores
        return scores, _enlarged(self.aux_classifier(features["aux"]), size)


def _torchvision(name: str, classes: int, **options: Any) -> nn.Module:
    # By `load`, which copes with a torchvision that was built for another torch.
    model: nn.Module = load(f"torchvision.models.{name}")(weights=None, num_classes=classes, **options)
    return model


def _vgg(name: str, classes: int, hidden: int, **options: Any) -> nn.Module:
    """With other fully connected layers where `hidden` asks for it; their names and places stay. They start as the
    convolutions do (He et al. 2015): torchvision's constant deviation lets next to nothing through fewer features."""
    if hidden < 1:
        raise InputError(f"model: hidden is {hidden}: write a number of features from 1 on, {HIDDEN} is VGG's own")
    model: Any = _torchvision(name, classes, **options)
    if hidden != HIDDEN:
        sizes = (model.classifier[0].in_features, hidden, hidden, classes)
        for place, wide, narrow in zip((0, 3, 6), sizes[:-1], sizes[1:], strict=True):
            layer = nn.Linear(wide, narrow)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
            model.classifier[place] = layer
    made: nn.Module = model
    return made


def _enlarged(scores: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(scores, size=size, mode="bilinear", align_corners=False)


# ---- losses and metrics


class SegmentationLoss(nn.CrossEntropyLoss):
    """Cross entropy over the pixels that are not `ignore_index`; an auxiliary head's is added with its weight."""

    def __init__(self, ignore_index: int = IGNORED, auxiliary_weight: float = 0.5) -> None:
        super().__init__(ignore_index=ignore_index)
        self.auxiliary_weight = auxiliary_weight

    def forward(self, output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        if isinstance(output, Tensor):
            return super().forward(output, target)
        scores, auxiliary = output
        return super().forward(scores, target) + self.auxiliary_weight * super().forward(auxiliary, target)


class MeanIoU:
    """The mean over classes of intersection over union, of the pixels of a whole evaluation set.

    A class that is neither there nor predicted has none and is left out.
    """

    def __init__(self, classes: int = 21, ignore_index: int = IGNORED) -> None:
        self.classes = classes
        self.ignore_index = ignore_index

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The batch's confusion matrix: pixels by true class (rows) and predicted class (columns)."""
        valid = target != self.ignore_index
        pairs = target[valid] * self.classes + output.argmax(dim=1)[valid]
        return torch.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def finish(self, total: Tensor) -> float:
        intersection = total.diagonal()
        union = total.sum(dim=0) + total.sum(dim=1) - intersection
        return float((intersection / union)[union > 0].mean())


def pixel_accuracy(output: Tensor, target: Tensor, ignore_index: int = IGNORED) -> tuple[Tensor, Tensor]:
    """The share of the pixels that are not ignored whose class is the one with the largest score."""
    return (output.argmax(dim=1) == target).sum(), (target != ignore_index).sum()


# ---- generated pictures


def images(
    split: str = "train",
    size: int = 224,
    classes: int = 1000,
    samples: int = 10_000,
    noise: float = 1.0,
    seed: int = 0,
) -> Dataset[tuple[Tensor, int]]:
    """(image, label): normalized floats (3, size, size) and the number of a class, whose pattern lies under noise."""
    return Images(split, size, classes, samples, noise, seed)


def segmentation(
    split: str = "train",
    size: int = 480,
    classes: int = 21,
    samples: int = 1_000,
    noise: float = 0.5,
    seed: int = 0,
) -> Dataset[tuple[Tensor, Tensor]]:
    """(image, mask): normalized floats (3, size, size) and each pixel's class (size, size), 0 the background and
    255 the edges of objects, which no loss or metric is to count."""
    return Scenes(split, size, classes, samples, noise, seed)


@dataclass(frozen=True)
class _Generated:
    split: str
    size: int
    classes: int
    samples: int
    noise: float
    seed: int

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise InputError(f"split is {self.split!r}: the generated pictures have {' and '.join(SPLITS)}")
        for name, count, least in (("size", self.size, 8), ("classes", self.classes, 2), ("samples", self.samples, 1)):
            if count < least:
                raise InputError(f"{name} is {count}: generated pictures need at least {least}")

    def __len__(self) -> int:
        return self.samples

    def _random(self, index: int) -> torch.Generator:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return torch.Generator().manual_seed(derive(self.seed, type(self).__name__, self.split, index))

    def _noisy(self, clean: Tensor, random: torch.Generator) -> Tensor:
        return clean + self.noise * torch.randn(clean.shape, generator=random)


class Images(_Generated, Dataset[tuple[Tensor, int]]):
    """The coarse pattern of a class."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = self._random(index)
        label = int(torch.randint(self.classes, (), generator=random))
        pattern = torch.randn(1, 3, PATCHES, PATCHES, generator=_of_class(label))
        clean = F.interpolate(pattern, size=(self.size, self.size), mode="bilinear", align_corners=False)[0]
        return self._noisy(clean, random), label


class Scenes(_Generated, Dataset[tuple[Tensor, Tensor]]):
    """Rectangles in the colors of their classes, later ones over earlier ones."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = self._random(index)
        clean = torch.zeros(3, self.size, self.size)
        mask = torch.zeros(self.size, self.size, dtype=torch.int64)
        edge = max(1, self.size // 100)
        for _ in range(OBJECTS):
            label = int(torch.randint(1, self.classes, (), generator=random))
            top, left = torch.randint(self.size // 2, (2,), generator=random).tolist()
            height, width = torch.randint(self.size // 4, self.size // 2, (2,), generator=random).tolist()
            bottom, right = top + height, left + width
            clean[:, top:bottom, left:right] = 2 * torch.randn(3, 1, 1, generator=_of_class(label))
            mask[top:bottom, left:right] = IGNORED
            mask[top + edge : bottom - edge, left + edge : right - edge] = label
        return self._noisy(clean, random), mask


def _of_class(label: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(0, "class", label))
