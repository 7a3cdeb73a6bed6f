"""Models with skip connections, towers and heads, and models of the transformers library, for tests of structure."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.user.call import load


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU())
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skip = self.down1(images)
        x = self.up(self.middle(self.down2(skip)))
        out: Tensor = self.last(torch.cat([x, skip], dim=1))
        return out


class Tower(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 8)
        self.dense = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.dense(self.table(ids))
        return out


class TwoTowers(nn.Module):
    def __init__(self, head: bool) -> None:
        super().__init__()
        self.user = Tower(10)
        self.item = Tower(20)
        self.head = nn.Bilinear(8, 8, 1) if head else None

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item = self.user(users), self.item(items)
        out: Tensor = (user * item).sum(-1) if self.head is None else self.head(user, item)
        return out


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12))
        self.age = nn.Linear(12, 1)
        self.name = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(features)
        return self.age(shared), self.name(shared)


class ResidualParent(nn.Module):
    """Adds the outputs of its blocks itself, so that a later stage needs all of them."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Unsplittable(nn.Module):
    """Normalizes or sorts the output of every linear layer over its features, so that no layer can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.b = nn.Linear(6, 4)
        self.c = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.norm(self.a(x)))
        out: Tensor = self.c(x.sort(dim=-1).values)
        return out


SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0},
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "BertForMaskedLM": {"max_position_embeddings": 32},
    "Phi3ForCausalLM": {"num_key_value_heads": 2, "pad_token_id": 0},
    "GPTNeoXForCausalLM": {},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}


def transformers_model(name: str) -> nn.Module:
    """A small model of the transformers library."""
    common = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 100,
        "eos_token_id": 0,
    }
    family = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
    options = SIZES[name]
    config = load(f"transformers.{family}Config")(
        **({"vocab_size": 100, "eos_token_id": 0} if "n_embd" in options else common), **options
    )
    model: nn.Module = load(f"transformers.{name}")(config)
    return model


def model_with_head_bias(name: str, layers: int = 2) -> tuple[nn.Module, Any]:
    """A model that adds a bias per head to its attention scores, and a batch."""
    torch.manual_seed(0)
    if name == "t5":
        pytest.importorskip("transformers")
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 100, "num_layers": layers}
        config = load("transformers.T5Config")(**sizes, decoder_start_token_id=0, use_cache=False)
        model: nn.Module = load("transformers.T5ForConditionalGeneration")(config)
        return model, {**token_ids(), "decoder_input_ids": token_ids()["input_ids"]}
    library = "torchvision.models.swin_transformer"
    windows = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    parts = {"block": "SwinTransformerBlockV2", "downsample_layer": "PatchMergingV2"} if name == "swin2" else {}
    version_2 = {key: load(f"{library}.{part}") for key, part in parts.items()}
    swin: nn.Module = load(f"{library}.SwinTransformer")(**windows, **version_2, num_classes=5)
    return swin, (torch.randn(4, 3, 32, 32), torch.zeros(4))


def token_ids(batch: int = 4, length: int = 16) -> dict[str, Tensor]:
    """A batch for a model of the transformers library."""
    return {"input_ids": torch.randint(0, 100, (batch, length))}
