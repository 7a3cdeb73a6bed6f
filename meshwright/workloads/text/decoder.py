"""One compact decoder that is GPT-2, GPT-3 or Llama by its keywords. `decoder_sizes` has the published ones.

A block takes and gives one tensor, so the model can be cut between any two blocks. Every projection is a
`nn.Linear` of its own, and attention finds its heads by their width, so projections can be split by heads.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.batch import at_least_fp32
from meshwright.errors import InputError, did_you_mean

STD = 0.02  # of GPT-2's initial weights
EPSILON = 1e-5  # of every norm in GPT-2, GPT-3 and Llama


class Decoder(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary), for any length up to `sequence`; with rotary
    positions also beyond it. `feedforward` defaults to what the published models of that activation have. Without a
    `head` it gives what the last norm does (batch, length, hidden)."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        sequence: int,
        vocabulary: int,
        kv_heads: int | None = None,
        norm: Literal["layer", "rms"] = "layer",
        positions: Literal["learned", "rotary"] = "learned",
        activation: Literal["gelu", "swiglu"] = "gelu",
        tied: bool = True,
        feedforward: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary_base: float = 10_000.0,
        head: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        wide = default_feedforward(hidden, activation) if feedforward is None else feedforward
        _check_words(norm=norm, positions=positions, activation=activation)
        _check_counts(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            sequence=sequence,
            vocabulary=vocabulary,
            feedforward=wide,
        )
        _check_division(hidden, heads, kv_heads, positions)
        self.sequence = sequence
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        base = rotary_base if positions == "rotary" else None
        self.blocks = nn.ModuleList(
            Block(
                _norm(norm, hidden, bias),
                Attention(hidden, heads, kv_heads, bias, dropout, base),
                _norm(norm, hidden, bias),
                FeedForward(hidden, wide, activation, bias),
                dropout,
            )
            for _ in range(layers)
        )
        self.norm = _norm(norm, hidden, bias)
        self.head: nn.Module = nn.Identity()
        if head:
            # A tied head's own weight would be thrown away at once: on meta it is never allocated.
            self.head = nn.Linear(hidden, vocabulary, bias=False, device="meta" if tied else None)
            if tied:
                self.head.weight = self.embedding.weight
        self._initialize(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            length = tokens.shape[-1]
            if length > self.sequence:
                raise InputError(
                    f"the batch is {length} tokens long, but the model has learned positions for sequence = "
                    f"{self.sequence}: shorten the data's sequence, raise the model's, or use rotary positions"
                )
            x = x + self.positions(torch.arange(length, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialize(self, layers: int) -> None:
        """GPT-2's: what is added to the residual stream starts smaller, the more layers add to it."""
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.o.weight", "feedforward.down.weight")):
                nn.init.normal_(parameter, std=STD / (2 * layers) ** 0.5)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    def __init__(
        self, norm1: nn.Module, attention: "Attention", norm2: nn.Module, feedforward: "FeedForward", dropout: float
    ) -> None:
        super().__init__()
        self.norm1 = norm1
        self.attention = attention
        self.norm2 = norm2
        self.feedforward = feedforward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feedforward(self.norm2(x)))


class Attention(nn.Module):
    """With fewer `kv_heads` than `heads`, each key and value serves a group of neighbouring queries. `causal`: a token
    sees those before it alone."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        bias: bool,
        dropout: float,
        rotary_base: float | None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.width = hidden // heads
        self.grouped = kv_heads != heads
        self.dropout = dropout
        self.rotary_base = rotary_base
        self.q = nn.Linear(hidden, heads * self.width, bias)
        self.k = nn.Linear(hidden, kv_heads * self.width, bias)
        self.v = nn.Linear(hidden, kv_heads * self.width, bias)
        self.o = nn.Linear(heads * self.width, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._by_head(project(x)) for project in (self.q, self.k, self.v))
        if self.rotary_base is not None:
            table = rotation(x.shape[-2], self.width, self.rotary_base, x.device, q.dtype)
            q, k = rotate(q, table), rotate(k, table)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=dropout, enable_gqa=self.grouped
        )
        out: Tensor = self.o(mixed.transpose(-3, -2).flatten(-2))
        return out

    def _by_head(self, projected: Tensor) -> Tensor:
        """(batch, length, heads × width) to (batch, heads, length, width), for as many heads as there are here."""
        return projected.unflatten(-1, (-1, self.width)).transpose(-3, -2)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, wide: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, wide, bias)
        self.gate = nn.Linear(hidden, wide, bias) if activation == "swiglu" else None
        self.down = nn.Linear(wide, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up
        out: Tensor = self.down(inner)
        return out


def rotation(
    length: int, width: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, width) of the angle by which each position turns each pair of channels.

    Made anew in every forward pass: a buffer would be lost where a model is built on the meta device and then
    materialized, would be rounded with a model that is cast to bf16, and would end at `sequence`.
    """
    frequency = base ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / -width)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Channel i is paired with i + width / 2, as in the published Llama weights of the transformers library."""
    cosine, sine = table
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class NextTokenLoss(nn.CrossEntropyLoss):
    """Cross entropy over the last dimension, in at least fp32: the mean over the targets that are not `ignore_index`.

    As a kind of torch's cross entropy it is known to be a mean over targets, whose number is told before the
    forward pass; a loss that returns (sum, count) would cost a second pass over the gradients.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(at_least_fp32(output).flatten(0, -2), target.flatten())


def token_accuracy(output: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The share of the targets that are not ignored which the largest logit names."""
    return (output.argmax(dim=-1) == target).sum(), (target != ignore_index).sum()


def default_feedforward(hidden: int, activation: str) -> int:
    """4 × hidden for GELU. SwiGLU has three matrices for two, so Llama takes 2/3 of that, up to a multiple of 256."""
    return 4 * hidden if activation == "gelu" else -(-(8 * hidden // 3) // 256) * 256


def _norm(kind: str, hidden: int, bias: bool) -> nn.Module:
    return nn.RMSNorm(hidden, EPSILON) if kind == "rms" else nn.LayerNorm(hidden, EPSILON, bias=bias)


_WORDS = {"norm": ("layer", "rms"), "positions": ("learned", "rotary"), "activation": ("gelu", "swiglu")}


def _check_words(**given: str) -> None:
    for name, word in given.items():
        if word not in _WORDS[name]:
            raise InputError(f"the decoder's {name} is {word!r}{did_you_mean(str(word), _WORDS[name])}")


def _check_counts(**given: Any) -> None:
    for name, count in given.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"the decoder's {name} is {count!r}: write a whole number from 1 on")


def _check_division(hidden: int, heads: int, kv_heads: int, positions: str) -> None:
    if hidden % heads:
        raise InputError(f"hidden({hidden}) does not divide into heads({heads}): choose a multiple of the heads")
    if heads % kv_heads:
        raise InputError(
            f"heads({heads}) do not divide into kv_heads({kv_heads}) groups: choose kv_heads that divide the heads"
        )
    if positions == "rotary" and hidden // heads % 2:
        raise InputError(
            f"hidden({hidden}) / heads({heads}) = {hidden // heads} channels a head, but rotary positions turn "
            "channels in pairs: choose an even number"
        )
