"""Small models of the kinds that users bring, each with something that is easily got wrong: models of timm, weights
that are computed from others, custom gradients, outputs that are dataclasses, decisions that depend on data, weights in
bf16, recomputation that the model does itself, and adapters on frozen layers, written by hand and of peft."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import Dataset

from meshwright.user.call import load
from tests.proof.models.transformers_models import CASES, Samples
from tests.zoo_models.adapters import with_lora

SAMPLES, WIDTH, CLASSES = 21, 8, 4


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    """Random vectors with a class each."""

    shape: tuple[int, ...] = (WIDTH,)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=draw), torch.tensor(index % CLASSES)


class Pictures(Vectors):
    """Random pictures with a class each."""

    shape = (3, 40, 40)


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).tanh())
        return out


class Stack(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Symmetric(nn.Module):
    """A parametrization by a class of the user: the weight is a symmetric matrix."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def weight_norm() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        parametrizations.weight_norm(block.get_submodule("up"))
    return model


def spectral_norm() -> nn.Module:
    """Power iteration changes buffers in every forward pass."""
    model = Stack()
    for block in model.blocks:
        parametrizations.spectral_norm(block.get_submodule("up"))
    return model


def symmetric() -> nn.Module:
    model = Stack()
    model.middle = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(model.middle, "weight", Symmetric())
    model.blocks.append(model.middle)
    return model


class _HalvedGradient(torch.autograd.Function):
    """The identity, whose gradient is halved where the input is negative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.where(x > 0, 1.0, 0.5).to(x.dtype)


class CustomFunction(Stack):
    def forward(self, x: Tensor) -> Any:
        return super().forward(_HalvedGradient.apply(x * 2))


@dataclass
class Scores:
    """An output that torch does not know as a structure of tensors."""

    logits: Tensor
    hidden: Tensor
    name: str = "scores"


@dataclass(frozen=True)
class Hidden:
    """What one block hands to the next."""

    x: Tensor


class DataclassBlock(Block):
    def forward(self, hidden: Any) -> Any:
        return Hidden(super().forward(hidden.x))


class DataclassOutput(Stack):
    """Also its blocks return dataclasses, which a pipeline cannot send."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DataclassBlock(), DataclassBlock()])

    def forward(self, x: Tensor) -> Any:
        hidden = Hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        return Scores(self.head(hidden.x), hidden.x)


@dataclass
class ScoresAndLoss:
    logits: Tensor
    loss: Tensor | None = None


class DataclassLoss(Stack):
    """Computes its loss itself and returns it in a dataclass."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(x)
        return ScoresAndLoss(logits, None if labels is None else F.cross_entropy(logits, labels))


def scores_loss(output: Scores, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target) + 0.1 * output.hidden.square().mean()


class Deciding(Stack):
    """Decides by values of the batch what it computes."""

    def forward(self, x: Tensor) -> Any:
        if x.isnan().any():
            return self.head(x)
        return super().forward(x)


class LowRank(nn.Module):
    """A frozen linear layer, and the product of two small trained matrices that is added to it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapters() -> nn.Module:
    model = Stack().requires_grad_(False)
    block: Any
    for block in model.blocks:
        block.up, block.down = LowRank(block.up), LowRank(block.down)
    return model


def bf16_weights() -> nn.Module:
    return Stack().to(torch.bfloat16)


def recomputing(name: str) -> nn.Module:
    model: Any = CASES[name].build()
    model.gradient_checkpointing_enable()
    return model


def build(name: str) -> nn.Module:
    return KINDS[name].build()


def timm(name: str, **options: Any) -> nn.Module:
    model: nn.Module = load("timm:create_model")(name, num_classes=CLASSES, **options)
    return model


def lora(name: str, **options: Any) -> nn.Module:
    return with_lora(CASES[name].build(), **options)


VECTORS = Vectors()
_LORA_CUT = "base_model.model.model.layers.0"


@dataclass(frozen=True)
class Kind:
    """A model, where a pipeline cuts it (None if it cannot), its data and its loss (None if the model computes it)."""

    build: Callable[[], nn.Module]
    cut: str | None = "blocks.0"
    data: Dataset[Any] = VECTORS
    loss: Callable[..., Tensor] | None = F.cross_entropy


KINDS = {
    "timm resnet": Kind(lambda: timm("resnet18", channels=(8, 8, 16, 16)), "layer2.1", Pictures()),
    "timm convnext": Kind(
        lambda: timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), "stages.1.blocks.0", Pictures()
    ),
    "timm vit": Kind(
        lambda: timm("vit_tiny_patch16_224", img_size=40, patch_size=8, embed_dim=16, depth=2, num_heads=2),
        "blocks.0",
        Pictures(),
    ),
    "weight norm": Kind(weight_norm),
    "spectral norm": Kind(spectral_norm),
    "symmetric": Kind(symmetric),
    "custom function": Kind(CustomFunction),
    "dataclass output": Kind(DataclassOutput, loss=scores_loss),
    "dataclass loss": Kind(DataclassLoss, loss=None),
    "deciding": Kind(Deciding),
    "adapters": Kind(adapters),
    "lora": Kind(lambda: lora("llama", lora_dropout=0.1), _LORA_CUT, Samples("causal"), None),
    "lora of all layers": Kind(lambda: lora("llama", target_modules="all-linear"), _LORA_CUT, Samples("causal"), None),
    "lora and a whole layer": Kind(
        lambda: lora("llama", modules_to_save=["lm_head"]), _LORA_CUT, Samples("causal"), None
    ),
    "dora": Kind(lambda: lora("llama", use_dora=True), _LORA_CUT, Samples("causal"), None),
    "lora in bf16": Kind(lambda: lora("llama").to(torch.bfloat16), _LORA_CUT, Samples("causal"), None),
    "bf16 weights": Kind(bf16_weights),
    "recomputing llama": Kind(lambda: recomputing("llama"), "model.layers.0", Samples("causal"), None),
    "recomputing t5": Kind(lambda: recomputing("t5"), None, Samples("translated"), None),
}
