"""A U-Net for images and volumes (Ronneberger et al. 2015, arXiv:1505.04597). As in nnU-Net (Isensee et al. 2021),
layers are padded, so that output and input have the same size, and instance norm replaces batch norm, so that samples
do not depend on each other."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.errors import InputError

_CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_POOLS = {2: nn.MaxPool2d, 3: nn.MaxPool3d}


class UNet(nn.Module):
    """Maps images (batch, channels, *sizes) to class scores (batch, classes, *sizes), with 2 or 3 sizes.

    `width` is the number of features at full resolution. Each of the `levels` below has half the resolution of the one
    above and twice the features, but not more than `most_features`. All sizes have to be multiples of
    2^(`levels` - 1)."""

    def __init__(
        self,
        dimensions: int = 2,
        channels: int = 1,
        classes: int = 2,
        width: int = 64,
        levels: int = 5,
        most_features: int = 1024,
    ) -> None:
        super().__init__()
        if dimensions not in (2, 3):
            raise InputError(f"the model's dimensions is {dimensions}: write 2 for images, or 3 for volumes")
        for name, number, fewest in (
            ("channels", channels, 1),
            ("classes", classes, 2),
            ("width", width, 1),
            ("levels", levels, 2),
            ("most_features", most_features, 1),
        ):
            if number < fewest:
                raise InputError(f"the model's {name} is {number}: write a whole number of at least {fewest}")
        features = [min(width * 2**level, most_features) for level in range(levels)]
        self.multiple = 2 ** (levels - 1)
        self.encoder = nn.ModuleList(
            EncoderBlock(dimensions, i, o, pools=level > 0)
            for level, (i, o) in enumerate(pairwise((channels, *features)))
        )
        self.decoder = nn.ModuleList(DecoderBlock(dimensions, i, o) for i, o in pairwise(reversed(features)))
        self.head = _CONVOLUTIONS[dimensions](features[0], classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        if any(size % self.multiple for size in images.shape[2:]):
            raise InputError(
                f"the model's input has the size {tuple(images.shape[2:])}: with {len(self.encoder)} levels, sizes must"
                f" be multiples of {self.multiple}"
            )
        skipped = []
        features = images
        for encode in self.encoder:
            features = encode(features)
            skipped.append(features)
        for decode, skip in zip(self.decoder, reversed(skipped[:-1]), strict=True):
            features = decode(features, skip)
        scores: Tensor = self.head(features)
        return scores


class EncoderBlock(nn.Module):
    """Halves the resolution if `pools`, then applies two convolutions."""

    def __init__(self, dimensions: int, inputs: int, outputs: int, pools: bool) -> None:
        super().__init__()
        self.pool = _POOLS[dimensions](2) if pools else nn.Identity()
        self.convolutions = _two_convolutions(dimensions, inputs, outputs)

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.convolutions(self.pool(features))
        return result


class DecoderBlock(nn.Module):
    """Doubles the resolution, joins the features of the encoder at that resolution, and applies two convolutions."""

    def __init__(self, dimensions: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.enlarge = _TRANSPOSED[dimensions](inputs, outputs, kernel_size=2, stride=2)
        self.convolutions = _two_convolutions(dimensions, 2 * outputs, outputs)

    def forward(self, features: Tensor, skipped: Tensor) -> Tensor:
        result: Tensor = self.convolutions(torch.cat([self.enlarge(features), skipped], dim=1))
        return result


def _two_convolutions(dimensions: int, inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in ((inputs, outputs), (outputs, outputs)):
        convolution = _CONVOLUTIONS[dimensions](i, o, kernel_size=3, padding=1, bias=False)
        layers += [convolution, _NORMS[dimensions](o, affine=True), nn.LeakyReLU(0.01, inplace=True)]
    return nn.Sequential(*layers)
