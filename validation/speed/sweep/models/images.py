"""Image models of torchvision and timm, trained as classifiers, and a segmentation net."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.user.call import load
from validation.speed.sweep.case import ModelCase, Sizes

CLASSES = 1000


def class_loss(output: Any, target: Tensor) -> Tensor:
    """The cross entropy of class scores, of scores in a dict with the key `out`, or of the first of several scores."""
    if isinstance(output, dict):
        output = output["out"]
    scores = output[0] if isinstance(output, tuple | list) else output
    return F.cross_entropy(scores, target)


def image_batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    samples, side = sizes["samples"], sizes["image"]
    return torch.randn(samples, 3, side, side), torch.randint(0, CLASSES, (samples,))


def mask_batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    samples, side = sizes["samples"], sizes["image"]
    return torch.randn(samples, 3, side, side), torch.randint(0, sizes["classes"], (samples, side, side))


def _torchvision(
    name: str, function: str, samples: int, channels_last: bool = True, optimizer: Any = "sgd", tiny_image: int = 64
) -> ModelCase:
    def build(sizes: Sizes) -> nn.Module:
        options = {"image_size": sizes["image"]} if function.startswith("vit_") else {}
        model: nn.Module = load(f"torchvision.models:{function}")(num_classes=CLASSES, **options)
        return model

    full, tiny = {"samples": samples, "image": 224}, {"samples": 2, "image": tiny_image}
    return ModelCase(
        name, "torchvision", build, image_batch, full, tiny, class_loss, optimizer, channels_last=channels_last
    )


def _timm(name: str, function: str, samples: int, channels_last: bool, image: int = 224) -> ModelCase:
    def build(sizes: Sizes) -> nn.Module:
        model: nn.Module = load("timm:create_model")(function, pretrained=False, num_classes=CLASSES)
        return model

    full, tiny = {"samples": samples, "image": image}, {"samples": 2, "image": image}
    return ModelCase(name, "timm", build, image_batch, full, tiny, class_loss, channels_last=channels_last)


def _deeplab(sizes: Sizes) -> nn.Module:
    build = load("torchvision.models.segmentation:deeplabv3_resnet101")
    model: nn.Module = build(weights=None, weights_backbone=None, num_classes=sizes["classes"])
    return model


TORCHVISION = (
    _torchvision("vit_b_16", "vit_b_16", 128, channels_last=False, optimizer="adamw"),
    _torchvision("convnext_t", "convnext_tiny", 128, optimizer="adamw"),
    _torchvision("swin_t", "swin_t", 128, channels_last=False, optimizer="adamw"),
    _torchvision("resnet50", "resnet50", 256),
    _torchvision("vgg16_32", "vgg16", 32),
    _torchvision("vgg16_256", "vgg16", 256),
    _torchvision("efficientnet_b0", "efficientnet_b0", 256),
    _torchvision("regnet_y_3_2gf", "regnet_y_3_2gf", 128),
    _torchvision("mobilenet_v3_large", "mobilenet_v3_large", 256),
    _torchvision("densenet121", "densenet121", 128),
    _torchvision("maxvit_t", "maxvit_t", 64, optimizer="adamw", tiny_image=224),
    _torchvision("shufflenet_v2", "shufflenet_v2_x1_0", 256),
    ModelCase(
        "deeplabv3_resnet101",
        "torchvision",
        _deeplab,
        mask_batch,
        {"samples": 8, "image": 480, "classes": 21},
        {"samples": 2, "image": 64, "classes": 21},
        class_loss,
        "sgd",
        channels_last=True,
    ),
)
TIMM = (
    _timm("beit_b_16", "beit_base_patch16_224", 64, channels_last=False),
    _timm("deit3_b_16", "deit3_base_patch16_224", 64, channels_last=False),
    _timm("mixer_b_16", "mixer_b16_224", 128, channels_last=False),
    _timm("levit_256", "levit_256", 256, channels_last=False),
    _timm("eva02_s_14", "eva02_small_patch14_224", 64, channels_last=False),
    _timm("hrnet_w18", "hrnet_w18", 64, channels_last=True),
    _timm("nfnet_f0", "dm_nfnet_f0", 64, channels_last=True, image=192),
    _timm("coatnet_0", "coatnet_0_rw_224", 64, channels_last=True),
)
