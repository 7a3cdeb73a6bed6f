"""Own models of images, volumes and points in space: a U-Net, a diffusion net with its loss inside, a net of 3-D
convolutions, an autoencoder with its loss inside, a radiance field, and detectors of torchvision."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.user.call import load
from meshwright.workloads.mnist import Net
from validation.speed.sweep.case import ModelCase, Sizes
from validation.speed.sweep.models.images import class_loss, mask_batch


def _double(inputs: int, outputs: int) -> nn.Sequential:
    def one(channels: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)

    return nn.Sequential(*one(inputs), *one(outputs))


class UNet(nn.Module):
    """Four halvings, and back, with the features of each resolution beside."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[:4])
        self.join = nn.ModuleList(_double(2 * w, w) for w in widths[:4])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            features.append(x)
        for level in reversed(range(4)):
            x = self.join[level](torch.cat([features[level], self.up[level](x)], dim=1))
        out: Tensor = self.head(x)
        return out


class TimedBlock(nn.Module):
    """Two convolutions, between which the embedding of the time is added."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        out: Tensor = self.skip(x) + self.conv2(self.drop(F.silu(self.norm2(hidden))))
        return out


class Diffusion(nn.Module):
    """Learns the noise that was added to images. Draws times and noise itself, and returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        time, widths = 4 * width, (width, 2 * width, 4 * width)
        self.embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(TimedBlock(a, b, time) for a, b in zip((width, *widths), widths, strict=False))
        self.up = nn.ModuleList(TimedBlock(a + b, b, time) for a, b in ((4 * width, 2 * width), (2 * width, width)))
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        time = torch.rand(len(images), device=images.device)
        keep = torch.cos(time * math.pi / 2)[:, None, None, None]
        noisy = keep * images + (1 - keep**2).sqrt() * noise
        frequencies = torch.exp(torch.linspace(0, 6, self.width // 2, device=images.device))
        angles = time[:, None] * frequencies
        embedded = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, features = self.stem(noisy), []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.avg_pool2d(x, 2), embedded)
            features.append(x)
        for level, block in zip((1, 0), self.up, strict=True):
            x = block(torch.cat([features[level], F.interpolate(x, scale_factor=2.0)], dim=1), embedded)
        return F.mse_loss(self.head(x).float(), noise)


class Autoencoder(nn.Module):
    """A variational autoencoder that returns its loss."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        area = (side // 4) ** 2
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.middle = nn.Linear(2 * width * area, 2 * width)
        self.back = nn.Sequential(
            nn.Linear(width, 2 * width * area), nn.Unflatten(1, (2 * width, side // 4, side // 4))
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        mean, log_variance = self.middle(self.encode(images)).float().chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).mean() / 2
        return F.mse_loss(self.decode(self.back(code)).float(), images) + 1e-3 * divergence


class Volumes(nn.Module):
    """Residual 3-D convolutions that classify volumes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width, 8 * width)
        self.stem = nn.Conv3d(1, width, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv3d(a, b, 3, 2, 1) for a, b in zip((width, *widths), widths, strict=False))
        self.second = nn.ModuleList(nn.Conv3d(b, b, 3, padding=1) for b in widths)
        self.norms = nn.ModuleList(nn.BatchNorm3d(b) for b in widths)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, second, norm in zip(self.first, self.second, self.norms, strict=True):
            x = F.relu(first(x))
            x = F.relu(x + norm(second(x)))
        out: Tensor = self.head(x.mean((2, 3, 4)))
        return out


class RadianceField(nn.Module):
    """Color and density at points in space, which are encoded by sines of many frequencies."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [60, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, 4)

    def forward(self, points: Tensor) -> Tensor:
        angles = points[..., None] * 2.0 ** torch.arange(10, device=points.device)
        x = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.head(x)
        return out


def _images(sizes: Sizes) -> Tensor:
    return torch.rand(sizes["samples"], 3, sizes["image"], sizes["image"])


def _volumes(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(sizes["samples"], 1, *[sizes["image"]] * 3), torch.randint(0, 10, (sizes["samples"],))


def _points(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(sizes["samples"], 3), torch.rand(sizes["samples"], 4)


def _digits(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(sizes["samples"], 1, 28, 28), torch.randint(0, 10, (sizes["samples"],))


def _pictures(sizes: Sizes) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images with three boxes each, as torchvision's detectors read them."""
    samples, side = sizes["samples"], sizes["image"]
    corners = torch.rand(samples, 3, 2) * side / 2
    boxes = torch.cat([corners, corners + side / 4 + 1], dim=2)
    labels = torch.randint(1, 20, (samples, 3))
    targets = [{"boxes": boxes[i], "labels": labels[i]} for i in range(samples)]
    return list(torch.rand(samples, 3, side, side)), targets


def _detector(name: str) -> ModelCase:
    def build(sizes: Sizes) -> nn.Module:
        build = load(f"torchvision.models.detection:{name}")
        size = {"min_size": sizes["image"], "max_size": sizes["image"]}
        model: nn.Module = build(weights=None, weights_backbone=None, num_classes=20, **size)
        return model

    full, tiny = {"samples": 8, "image": 512}, {"samples": 2, "image": 64}
    return ModelCase(name.removesuffix("_fpn"), "torchvision", build, _pictures, full, tiny, None, "sgd")


def _segmentation(sizes: Sizes) -> nn.Module:
    return UNet(sizes["width"], sizes["classes"])


OWN_IMAGES = (
    ModelCase(
        "unet",
        "own",
        _segmentation,
        mask_batch,
        {"samples": 16, "image": 256, "width": 32, "classes": 21},
        {"samples": 2, "image": 32, "width": 8, "classes": 21},
        class_loss,
        channels_last=True,
    ),
    ModelCase(
        "diffusion_unet",
        "own",
        lambda sizes: Diffusion(sizes["width"]),
        _images,
        {"samples": 64, "image": 64, "width": 128},
        {"samples": 2, "image": 16, "width": 16},
        channels_last=True,
    ),
    ModelCase(
        "autoencoder",
        "own",
        lambda sizes: Autoencoder(sizes["width"], sizes["image"]),
        _images,
        {"samples": 256, "image": 64, "width": 128},
        {"samples": 2, "image": 16, "width": 8},
        channels_last=True,
    ),
    ModelCase(
        "conv3d",
        "own",
        lambda sizes: Volumes(sizes["width"], 10),
        _volumes,
        {"samples": 16, "image": 64, "width": 32},
        {"samples": 2, "image": 16, "width": 4},
        class_loss,
        "sgd",
    ),
    ModelCase(
        "radiance_field",
        "own",
        lambda sizes: RadianceField(sizes["width"], sizes["layers"]),
        _points,
        {"samples": 65536, "width": 256, "layers": 8},
        {"samples": 64, "width": 16, "layers": 3},
        F.mse_loss,
    ),
    ModelCase(
        "mnist_net",
        "own",
        lambda sizes: Net(),
        _digits,
        {"samples": 64},
        {"samples": 8},
        class_loss,
        "sgd",
        channels_last=True,
    ),
    _detector("retinanet_resnet50_fpn"),
    _detector("fcos_resnet50_fpn"),
    _detector("fasterrcnn_resnet50_fpn"),
)
