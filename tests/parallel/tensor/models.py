"""Models as people write them, with sizes in their code, each with a batch."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.profile.models import tiny_decoder
from tests.profile.structure.structured_models import model_with_head_bias, token_ids, transformers_model

B, T, C, HEADS, VOCABULARY = 3, 6, 16, 4, 37


class FusedAttention(nn.Module):
    """The attention of nanoGPT: one projection, sliced by `split`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
        q = q.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
        v = v.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        out: Tensor = self.c_proj(y)
        return out


class NanoBlock(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C, bias=False)
        self.attn = FusedAttention(dropout)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C), "c_proj": nn.Linear(4 * C, C)})
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        inner = F.gelu(self.mlp["c_fc"](self.ln_2(x)))
        return x + self.drop(self.mlp["c_proj"](self.drop(inner)))


class NanoGPT(nn.Module):
    """nanoGPT, with a tied embedding and a vocabulary that no number of ranks divides."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, C), nn.Embedding(2 * T, C)
        self.h = nn.ModuleList(NanoBlock(dropout) for _ in range(2))
        self.ln_f = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        out: Tensor = self.lm_head(self.ln_f(x))
        return out


class UnfusedAttention(nn.Module):
    """The attention of GPT-2 without a fused kernel, with a causal mask in a buffer and norms of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.norm = nn.LayerNorm(C // HEADS)
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(T, T)).view(1, 1, T, T))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        q, k = self.norm(q), self.norm(k)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        mixed = scores.softmax(dim=-1) @ v
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out + x


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as the transformers library has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return product.view((*x.size()[:-1], self.outputs))


class Conv1DFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(4 * C, C), Conv1D(C, 4 * C)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Encoder(nn.Module):
    """An encoder like BERT of torch's own layers, with a padding mask."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(C, HEADS, 3 * C, 0.0, batch_first=True, norm_first=norm_first)
        self.embedding = nn.Embedding(VOCABULARY, C, padding_idx=0)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(C, 5)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        encoded = self.body(self.embedding(tokens), src_key_padding_mask=padding)
        out: Tensor = self.head(encoded.masked_fill(padding.unsqueeze(-1), 0).sum(1))
        return out


class Classifier(nn.Module):
    """Like VGG: a few convolutions, then linear layers with nearly all of the weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True))
        self.classifier = nn.Sequential(
            nn.Linear(3 * 4 * 4, 20),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(20, 22),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.Linear(22, 7),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.flatten(self.features(x), 1))
        return out


class BareParameters(nn.Module):
    """A feed-forward block of bare parameters, without `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(C, 24)), nn.Parameter(torch.randn(24))
        self.w2 = nn.Parameter(torch.randn(24, C))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul((x @ self.w1 + self.b1).relu(), self.w2)


def words(low: int = 0) -> Tensor:
    return torch.randint(low, VOCABULARY, (B, T))


def _padded() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 4:] = True
    return words(1).masked_fill(padding, 0), padding


def _llama(**changes: Any) -> nn.Module:
    settings: dict[str, Any] = {
        "norm": "rms",
        "positions": "rotary",
        "activation": "swiglu",
        "kv_heads": 2,
        "tied": False,
    }
    return tiny_decoder(**{**settings, "hidden": C, "feedforward": 24, "vocabulary": VOCABULARY, **changes})


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(C, 32), nn.ReLU(inplace=True), nn.Linear(32, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "nano": (NanoGPT, lambda: (words(),)),
    "llama": (_llama, lambda: (words(),)),
    "decoder": (lambda: tiny_decoder(hidden=C, vocabulary=VOCABULARY), lambda: (words(),)),
    "small": (UnfusedAttention, lambda: (torch.randn(B, T, C, dtype=torch.float64),)),
    "conv1d": (Conv1DFeedForward, lambda: (torch.randn(B, T, C, dtype=torch.float64),)),
    "own": (BareParameters, lambda: (torch.randn(B, T, C, dtype=torch.float64),)),
    "post": (lambda: Encoder(False), _padded),
    "pre": (lambda: Encoder(True), _padded),
    "mlp": (_mlp, lambda: (torch.randn(B, C, dtype=torch.float64),)),
    "vgg": (Classifier, lambda: (torch.randn(B, 2, 4, 4, dtype=torch.float64),)),
    "swin": (lambda: model_with_head_bias("swin")[0], lambda: (torch.randn(2, 3, 32, 32, dtype=torch.float64),)),
    "swin2": (lambda: model_with_head_bias("swin2")[0], lambda: (torch.randn(2, 3, 32, 32, dtype=torch.float64),)),
}


def make(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model in fp64, the same in every rank, and its arguments."""
    torch.manual_seed(0)
    if name in MODELS:
        build, batch = MODELS[name]
        return _without_dropout(build()), batch(), {}
    if name == "t5":
        model, inputs = model_with_head_bias("t5")
        return _without_dropout(model), (), {key: value[:2] for key, value in inputs.items()}
    return _without_dropout(transformers_model(name)), (), {**token_ids(2, 8), "use_cache": False}


def _without_dropout(model: nn.Module) -> nn.Module:
    """The model in fp64 with all dropout set to 0: models of the libraries have dropout by default."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
    return model.double()
