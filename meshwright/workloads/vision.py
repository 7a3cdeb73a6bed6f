"""torchvision's models for classification and segmentation, their losses and metrics, and pictures generated in memory.

Picture i is a function of (seed, split, i) and is generated when it is read, so a data set of any length takes no
memory. The appearance of a class depends on the class alone: it is the same in every split and under every seed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.user.call import load

SPLITS = ("train", "test")
IGNORED = 255  # the class number that PASCAL VOC gives to the edges of objects
HIDDEN = 4096  # features between VGG's fully connected layers
PATCHES = 4  # height and width of the pattern of a class, before it is enlarged
OBJECTS = 3  # in a generated picture for segmentation

# ---- models


def vgg16(classes: int = 1000, hidden: int = HIDDEN, **options: Any) -> nn.Module:
    """Returns torchvision's VGG16 without pretrained weights. `hidden` is the number of features between its fully
    connected layers, which can be lowered for small machines. `options` are keywords of torchvision, such as
    `dropout`."""
    return _vgg("vgg16", classes, hidden, **options)


def vgg19(classes: int = 1000, hidden: int = HIDDEN, **options: Any) -> nn.Module:
    return _vgg("vgg19", classes, hidden, **options)


def resnet18(classes: int = 1000, **options: Any) -> nn.Module:
    return _torchvision("resnet18", classes, **options)


def resnet50(classes: int = 1000, **options: Any) -> nn.Module:
    return _torchvision("resnet50", classes, **options)


def deeplab(classes: int = 21, auxiliary: bool = False, zero_init_residual: bool = False) -> nn.Module:
    """Returns DeepLabV3 on ResNet-101. With `auxiliary`, a second head learns from an earlier layer (see
    `SegmentationLoss`). With `zero_init_residual`, the last BatchNorm weight of every residual block starts at zero;
    torchvision has this keyword for its ResNets, but not for DeepLabV3."""
    model: Any = _torchvision("segmentation.deeplabv3_resnet101", classes, weights_backbone=None, aux_loss=auxiliary)
    if zero_init_residual:
        for name, weight in model.backbone.named_parameters():
            if name.endswith("bn3.weight"):
                nn.init.zeros_(weight)
    return DeepLab(model)


class DeepLab(nn.Module):
    """torchvision's DeepLabV3 with the same parameter names. It returns the scores (batch, classes, height, width)
    instead of a dict. In training with an auxiliary head, it returns the pair of both heads' scores."""

    def __init__(self, torchvision_model: Any) -> None:
        super().__init__()
        self.backbone = torchvision_model.backbone
        self.classifier = torchvision_model.classifier
        self.aux_classifier = torchvision_model.aux_classifier

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        size = images.shape[-2:]
        features = self.backbone(images)
        scores = _resize_scores(self.classifier(features["out"]), size)
        if self.aux_classifier is None or not self.training:
            return scores
        return scores, _resize_scores(self.aux_classifier(features["aux"]), size)


def _torchvision(name: str, classes: int, **options: Any) -> nn.Module:
    # `load` also imports a torchvision that was built for another version of torch.
    model: nn.Module = load(f"torchvision.models.{name}")(weights=None, num_classes=classes, **options)
    return model


def _vgg(name: str, classes: int, hidden: int, **options: Any) -> nn.Module:
    """Returns torchvision's VGG. If `hidden` is not VGG's number of features, the fully connected layers are replaced
    by new ones with the same names. These are initialized like the convolutions (He et al. 2015), because with the
    constant standard deviation that torchvision uses, the outputs of narrow layers would vanish."""
    if hidden < 1:
        raise InputError(f"model: hidden is {hidden}: write a number of features of at least 1; VGG has {HIDDEN}")
    model: Any = _torchvision(name, classes, **options)
    if hidden != HIDDEN:
        sizes = (model.classifier[0].in_features, hidden, hidden, classes)
        for index, inputs, outputs in zip((0, 3, 6), sizes[:-1], sizes[1:], strict=True):
            layer = nn.Linear(inputs, outputs)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
            model.classifier[index] = layer
    vgg: nn.Module = model
    return vgg


def _resize_scores(scores: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(scores, size=size, mode="bilinear", align_corners=False)


# ---- losses and metrics


class SegmentationLoss(nn.CrossEntropyLoss):
    """The mean cross entropy over the pixels whose class is not `ignore_index`. If the model returns a pair of scores,
    the loss of the second one (the auxiliary head) is added, multiplied by `auxiliary_weight`."""

    def __init__(self, ignore_index: int = IGNORED, auxiliary_weight: float = 0.5) -> None:
        super().__init__(ignore_index=ignore_index)
        self.auxiliary_weight = auxiliary_weight

    def forward(self, output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        if isinstance(output, Tensor):
            return super().forward(output, target)
        scores, auxiliary = output
        return super().forward(scores, target) + self.auxiliary_weight * super().forward(auxiliary, target)


class MeanIoU:
    """The mean over classes of intersection over union, counted over the pixels of the whole evaluation set.

    A class that neither occurs nor is predicted has an empty union and is not part of the mean.
    """

    def __init__(self, classes: int = 21, ignore_index: int = IGNORED) -> None:
        self.classes = classes
        self.ignore_index = ignore_index

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the batch's confusion matrix: pixels by true class (rows) and predicted class (columns)."""
        valid = target != self.ignore_index
        class_pairs = target[valid] * self.classes + output.argmax(dim=1)[valid]
        return torch.bincount(class_pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def finish(self, total: Tensor) -> float:
        """Returns the mean IoU of the sum of all batches' confusion matrices."""
        intersection = total.diagonal()
        union = total.sum(dim=0) + total.sum(dim=1) - intersection
        return float((intersection / union)[union > 0].mean())


def pixel_accuracy(output: Tensor, target: Tensor, ignore_index: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Returns how many pixels are classified correctly, and how many have a class other than `ignore_index`. The
    model has no score for that class, so ignored pixels never count as correct."""
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
    """Returns a data set of (image, label). An image is normalized floats (3, size, size): the pattern of its class
    plus noise. A label is the class number."""
    return Images(split, size, classes, samples, noise, seed)


def segmentation(
    split: str = "train",
    size: int = 480,
    classes: int = 21,
    samples: int = 1_000,
    noise: float = 0.5,
    seed: int = 0,
) -> Dataset[tuple[Tensor, Tensor]]:
    """Returns a data set of (image, mask): normalized floats (3, size, size) and the class of each pixel (size, size).
    Class 0 is the background; 255 marks the edges of objects, which losses and metrics ignore."""
    return Scenes(split, size, classes, samples, noise, seed)


@dataclass(frozen=True)
class _GeneratedPictures:
    """Base of the generated data sets: checks the keywords, and provides seeded random numbers. Seeds are derived from
    the name of the subclass, so renaming `Images` or `Scenes` would change their pictures."""

    split: str
    size: int
    classes: int
    samples: int
    noise: float
    seed: int

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise InputError(f"split is {self.split!r}: the generated pictures have {' and '.join(SPLITS)}")
        for name, count, minimum in (
            ("size", self.size, 8),
            ("classes", self.classes, 2),
            ("samples", self.samples, 1),
        ):
            if count < minimum:
                raise InputError(f"{name} is {count}: generated pictures need at least {minimum}")

    def __len__(self) -> int:
        return self.samples

    def _sample_generator(self, index: int) -> torch.Generator:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return torch.Generator().manual_seed(derive_seed(self.seed, type(self).__name__, self.split, index))

    def _add_noise(self, clean: Tensor, random: torch.Generator) -> Tensor:
        return clean + self.noise * torch.randn(clean.shape, generator=random)


class Images(_GeneratedPictures, Dataset[tuple[Tensor, int]]):
    """Generated pictures for classification: each shows the coarse random pattern of its class, under noise."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = self._sample_generator(index)
        label = int(torch.randint(self.classes, (), generator=random))
        pattern = torch.randn(1, 3, PATCHES, PATCHES, generator=_class_generator(label))
        clean = F.interpolate(pattern, size=(self.size, self.size), mode="bilinear", align_corners=False)[0]
        return self._add_noise(clean, random), label


class Scenes(_GeneratedPictures, Dataset[tuple[Tensor, Tensor]]):
    """Generated pictures for segmentation: rectangles in the colors of their classes. Later rectangles cover earlier
    ones."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = self._sample_generator(index)
        clean = torch.zeros(3, self.size, self.size)
        mask = torch.zeros(self.size, self.size, dtype=torch.int64)
        edge = max(1, self.size // 100)
        for _ in range(OBJECTS):
            label = int(torch.randint(1, self.classes, (), generator=random))
            top, left = torch.randint(self.size // 2, (2,), generator=random).tolist()
            height, width = torch.randint(self.size // 4, self.size // 2, (2,), generator=random).tolist()
            bottom, right = top + height, left + width
            clean[:, top:bottom, left:right] = 2 * torch.randn(3, 1, 1, generator=_class_generator(label))
            mask[top:bottom, left:right] = IGNORED
            mask[top + edge : bottom - edge, left + edge : right - edge] = label
        return self._add_noise(clean, random), mask


def _class_generator(label: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(0, "class", label))
