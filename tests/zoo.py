"""Small models of common kinds, written as users write them, with data and loss: every plan is proved equal on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.workloads.mnist import Net
from meshwright.workloads.text.decoder import Decoder

SAMPLES, BATCH = 42, 16  # the third batch is short: ten samples
CLASSES, WORDS, LENGTH = 4, 37, 6  # a vocabulary that no number of ranks divides


class Vgg(nn.Module):
    """Convolutions, and a classifier that has most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(True)
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(32, 24), nn.ReLU(True), nn.Dropout(), nn.Linear(24, 16), nn.ReLU(True), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.flatten(self.pool(self.features(x)), 1))
        return out


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
        self.layer1, self.layer2 = nn.Sequential(Residual(4), Residual(4)), nn.Sequential(Residual(4), Residual(4))
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


class Attention(nn.Module):
    """Attention as in nanoGPT: one layer for queries, keys and values, and sizes written out in views."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Gpt(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) / 8)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Bert(nn.Module):
    """torch's own encoder with masked padding. The output layer shares its weight with the embedding."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width, padding_idx=0), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decode = nn.Linear(width, WORDS)
        self.decode.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.decode(self.encoder(x, src_key_padding_mask=tokens == 0))
        return out


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layers(self.words(tokens).mean(1))
        return out


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = Tower(8), Tower(8)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return (self.query(query) * self.document(document)).sum(-1)


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.classify = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.estimate = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.encoder(x)
        return self.classify(shared), self.estimate(shared)


class RandomSamples(Dataset[Any]):
    """Random samples of one kind. In the first third of them, targets that a loss may ignore have the ignored value."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kind = kind
        size = 28 if kind == "digits" else 8
        self.images = torch.randn(SAMPLES, 1, size, size, generator=generator)
        self.tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
        self.tokens[:, -1] *= torch.arange(SAMPLES) % 2  # some end in padding
        self.classes = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.next = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
        self.numbers = torch.randn(SAMPLES, generator=generator)
        self.features = torch.randn(SAMPLES, 12, generator=generator)
        self.classes[: SAMPLES // 3] = -100
        self.next[: SAMPLES // 3, 1:] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        if self.kind in ("digits", "images"):
            return self.images[i], self.classes[i]
        if self.kind == "tokens":
            return self.tokens[i], self.next[i]
        if self.kind == "pairs":
            return self.tokens[i], self.tokens[-1 - i].roll(1), self.numbers[i]
        return self.features[i], {"class": self.classes[i].clamp(min=0), "number": self.numbers[i]}


def token_loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all valid tokens, and their number."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()


def pair_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(scores, targets)


def task_loss(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    classes, numbers = outputs
    return F.cross_entropy(classes, targets["class"]) + 0.5 * F.mse_loss(numbers[:, 0], targets["number"])


@dataclass(frozen=True)
class ZooModel:
    """How to build a model, the kind of its samples, and its loss."""

    model: Callable[[], nn.Module]
    data: str
    loss: Callable[[Any, Any], Any]


def mixture() -> Decoder:
    """Our own decoder with experts."""
    experts = {"number": 4, "top_k": 2}
    return Decoder(4, 16, 4, LENGTH, WORDS, positions="rotary", activation="swiglu", feedforward=16, experts=experts)


ZOO = {
    "mnist": ZooModel(Net, "digits", F.cross_entropy),
    "vgg": ZooModel(Vgg, "images", F.cross_entropy),
    "resnet": ZooModel(ResNet, "images", F.cross_entropy),
    "gpt": ZooModel(Gpt, "tokens", token_loss),
    "bert": ZooModel(Bert, "tokens", token_loss),
    "two_tower": ZooModel(TwoTowers, "pairs", pair_loss),
    "multitask": ZooModel(MultiTask, "features", task_loss),
    "mixture": ZooModel(mixture, "tokens", token_loss),
}
