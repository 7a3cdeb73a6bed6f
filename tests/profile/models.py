"""Small models of common kinds, each with a batch and a loss, for tracing and for real steps."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.user.call import load
from meshwright.workloads.mnist import Net
from meshwright.workloads.text.decoder import Decoder

ModelCase = tuple[nn.Module, Any, Callable[[Any, Any], Tensor]]


def scores_loss(output: Tensor, target: Tensor) -> Tensor:
    if output.dim() == 3:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())
    return F.cross_entropy(output, target)


def image_batch(batch: int, channels: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, channels, size, size), torch.randint(0, 10, (batch,))


def token_batch(batch: int, length: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 100, (batch, length)), torch.randint(0, 100, (batch, length))


def tiny_decoder(**options: Any) -> Decoder:
    defaults = {"layers": 3, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 100}
    return Decoder(**{**defaults, **options})


def tiny_llama(**options: Any) -> Decoder:
    defaults = {"norm": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 2, "tied": False}
    return tiny_decoder(**{**defaults, **options})


def small_model(name: str, batch: int = 4) -> ModelCase:
    """A small model with values, a batch for it, and its loss."""
    torch.manual_seed(0)
    if name == "mnist":
        return Net(), image_batch(batch, 1, 28), scores_loss
    if name == "vgg":
        layers: list[nn.Module] = [
            nn.Conv2d(3, 8, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 15 * 15, 64),
        ]
        return (
            nn.Sequential(*layers, nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)),
            image_batch(batch, 3, 32),
            scores_loss,
        )
    if name == "resnet18":
        return load("torchvision.models.resnet18")(num_classes=10), image_batch(batch, 3, 32), scores_loss
    if name == "gpt":
        return tiny_decoder(), token_batch(batch), scores_loss
    if name == "llama":
        return tiny_llama(), token_batch(batch), scores_loss
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(100, 32), body, nn.Linear(32, 100)), token_batch(batch), scores_loss
    raise KeyError(name)
