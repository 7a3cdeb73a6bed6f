"""A compact decoder whose keywords make it GPT-2, GPT-3 or Llama. `decoder_sizes` lists the published sizes.

A block takes one tensor and returns one, so a pipeline can be cut between any two blocks. Every projection is a
separate `nn.Linear`, and attention computes the number of heads from the width of its input, so projections can be
split by heads.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError, did_you_mean
from meshwright.model_io.batch import at_least_fp32
from meshwright.workloads.text.experts import Mixture

STD = 0.02  # standard deviation of GPT-2's initial weights
EPSILON = 1e-5  # of every norm in GPT-2, GPT-3 and Llama


class Decoder(nn.Module):
    """Maps tokens (batch, length) to logits (batch, length, vocabulary).

    The length may be up to `sequence`; with rotary positions it may be longer. `feedforward` is the inner width of the
    feed-forward layers; None takes the width of the published models with the same activation (`default_feedforward`).
    `experts` puts a mixture of experts in place of every feed-forward layer: a dict with their `number`, `top_k` (2 by
    default) and `capacity` (none by default; experts.py); each has the inner width `feedforward`. With `tied`, the head
    shares the weight of the embedding. If `head` is False, the model returns the output of its last norm (batch,
    length, hidden).
    """

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
        experts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        inner_width = default_feedforward(hidden, activation) if feedforward is None else feedforward
        _check_choices(norm=norm, positions=positions, activation=activation)
        _check_counts(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            sequence=sequence,
            vocabulary=vocabulary,
            feedforward=inner_width,
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
                _feed_forward(hidden, inner_width, activation, bias, experts),
                dropout,
            )
            for _ in range(layers)
        )
        self.norm = _norm(norm, hidden, bias)
        self.head: nn.Module = nn.Identity()
        if head:
            # The weight that nn.Linear creates is replaced at once if the head is tied: on meta it costs no memory.
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
        """Applies GPT-2's initialization: normal with standard deviation `STD`, divided by the square root of 2 ×
        `layers` for the 2 × `layers` weights whose outputs are added to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.o.weight", "feedforward.down.weight", "feedforward.experts.down")):
                nn.init.normal_(parameter, std=STD / (2 * layers) ** 0.5)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and feed-forward layers, each preceded by a norm and added to the residual stream."""

    def __init__(
        self, norm1: nn.Module, attention: "Attention", norm2: nn.Module, feedforward: nn.Module, dropout: float
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
    """Multi-head attention. With fewer `kv_heads` than `heads`, a group of neighbouring query heads shares a key and
    value head. With `causal`, a token attends to itself and the tokens before it only."""

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
        q, k, v = (self._split_heads(project(x)) for project in (self.q, self.k, self.v))
        if self.rotary_base is not None:
            table = rotation(x.shape[-2], self.width, self.rotary_base, x.device, q.dtype)
            q, k = rotate(q, table), rotate(k, table)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=dropout, enable_gqa=self.grouped
        )
        out: Tensor = self.o(mixed.transpose(-3, -2).flatten(-2))
        return out

    def _split_heads(self, projected: Tensor) -> Tensor:
        """Reshapes (batch, length, heads × width) to (batch, heads, length, width). A tensor-parallel rank has only
        some of the heads, so their number is taken from the input."""
        return projected.unflatten(-1, (-1, self.width)).transpose(-3, -2)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, or three with SwiGLU."""

    def __init__(self, hidden: int, inner_width: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner_width, bias)
        self.gate = nn.Linear(hidden, inner_width, bias) if activation == "swiglu" else None
        self.down = nn.Linear(inner_width, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inner = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up
        out: Tensor = self.down(inner)
        return out


def rotation(
    length: int, width: int, base: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (length, width) of the angle by which each position rotates each pair of channels.

    They are computed in every forward pass. A buffer would be lost when a model is built on the meta device and then
    materialized, would be rounded when the model is cast to bf16, and would end at `sequence`.
    """
    frequency = base ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / -width)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rotary positions to queries or keys. Channel i is paired with channel i + width / 2, as in the published
    Llama weights of the transformers library."""
    cosine, sine = table
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class NextTokenLoss(nn.CrossEntropyLoss):
    """The mean cross entropy over the targets that are not `ignore_index`, computed in fp32 or wider.

    It is a subclass of torch's cross entropy. From this, training knows that it is a mean over targets, and can count
    the targets before the forward pass. A loss that returns (sum, count) would cost a second pass over the gradients.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(at_least_fp32(output).flatten(0, -2), target.flatten())


def token_accuracy(output: Tensor, target: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Returns the number of targets that have the largest logit, and the number of targets that are not
    `ignore_index`."""
    return (output.argmax(dim=-1) == target).sum(), (target != ignore_index).sum()


def default_feedforward(hidden: int, activation: str) -> int:
    """Returns the inner width of a feed-forward layer. It is 4 × hidden for GELU. SwiGLU has three matrices instead of
    two, so Llama takes 2/3 of this width, rounded up to a multiple of 256."""
    return 4 * hidden if activation == "gelu" else -(-(8 * hidden // 3) // 256) * 256


def _feed_forward(
    hidden: int, inner_width: int, activation: str, bias: bool, experts: dict[str, Any] | None
) -> nn.Module:
    if experts is None:
        return FeedForward(hidden, inner_width, activation, bias)
    if not isinstance(experts, dict):
        raise InputError(
            f"the decoder's experts are {experts!r}: write their number and top_k, {{number: 8, top_k: 2}}"
        )
    for name in experts:
        if name not in _EXPERTS:
            raise InputError(f"the decoder's experts have no '{name}'{did_you_mean(str(name), _EXPERTS)}")
    _check_counts(**{f"experts.{name}": experts.get(name, 2) for name in ("number", "top_k")})
    number, top_k, capacity = experts.get("number", 2), experts.get("top_k", 2), experts.get("capacity")
    return Mixture(hidden, inner_width, number, top_k, activation, capacity)


_EXPERTS = ("number", "top_k", "capacity")


def _norm(kind: str, hidden: int, bias: bool) -> nn.Module:
    return nn.RMSNorm(hidden, EPSILON) if kind == "rms" else nn.LayerNorm(hidden, EPSILON, bias=bias)


_CHOICES = {"norm": ("layer", "rms"), "positions": ("learned", "rotary"), "activation": ("gelu", "swiglu")}


def _check_choices(**keywords: str) -> None:
    for name, choice in keywords.items():
        if choice not in _CHOICES[name]:
            raise InputError(f"the decoder's {name} is {choice!r}{did_you_mean(str(choice), _CHOICES[name])}")


def _check_counts(**keywords: Any) -> None:
    for name, count in keywords.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"the decoder's {name} is {count!r}: write a whole number of at least 1")


def _check_division(hidden: int, heads: int, kv_heads: int, positions: str) -> None:
    if hidden % heads:
        raise InputError(f"hidden({hidden}) is not divisible by heads({heads}): choose a multiple of the heads")
    if heads % kv_heads:
        raise InputError(
            f"heads({heads}) is not divisible by kv_heads({kv_heads}): choose kv_heads that divide the heads"
        )
    if positions == "rotary" and hidden // heads % 2:
        raise InputError(
            f"hidden({hidden}) / heads({heads}) = {hidden // heads} channels per head, but rotary positions "
            "rotate pairs of channels: choose hidden and heads such that it is even"
        )
