"""Decoders with mixtures of experts as published runs have them: attention with heads of any width, with latent keys
and values (DeepSeek) or within a window (GPT-OSS), dense blocks before the mixtures, and shared experts. Only shapes
and operators matter here. reading/mixtures.yaml lists the published sizes.

Forward FLOPs of one sample of s tokens (`mixture_forward`), with w the width of a head:

    attention   2 s (projections) + 4 s · keys · heads · w        keys = s, or the window
    feedforward 2 s · 3 h · (inner · top_k + shared), or 2 s · 3 h · dense in dense blocks; router 2 s h E
    head        2 s h V
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.workloads.text.decoder import EPSILON, Block, FeedForward, rotate, rotation
from meshwright.workloads.text.experts import grouped_product

_ROTARY_BASE = 10_000.0
_LATENT_QUERIES, _LATENT_KEYS = 1536, 512  # ranks of DeepSeek's low-rank projections
_KEY_WIDTH, _ROTARY_WIDTH = 192, 64  # of a head, with the numbers that are rotated
# Keys have 192 numbers, values 128. An attention with 160 in both has as many FLOPs, and is one operator of torch.
_EVEN_WIDTH = 160


class MixtureDecoder(nn.Module):
    """Maps tokens (batch, length) to logits (batch, length, vocabulary).

    `width` is that of a head. The first `dense_layers` blocks have feed-forward layers of the inner width `dense`, the
    others `experts` experts of the inner width `inner`, `top_k` for each token, and shared experts of the inner width
    `shared`. With `latent`, attention is DeepSeek's; with `window`, every second attention sees so many tokens.
    """

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        vocabulary: int,
        experts: int,
        top_k: int,
        inner: int,
        sequence: int,
        width: int = 128,
        kv_heads: int = 0,
        shared: int = 0,
        dense_layers: int = 0,
        dense: int = 0,
        latent: bool = False,
        window: int = 0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        blocks = []
        for number in range(layers):
            attention = (
                LatentAttention(hidden, heads)
                if latent
                else WideAttention(hidden, heads, kv_heads or heads, width, window if number % 2 == 0 else 0)
            )
            feedforward: nn.Module = (
                FeedForward(hidden, dense, "swiglu", bias=False)
                if number < dense_layers
                else SharedMixture(hidden, inner, experts, top_k, shared)
            )
            blocks.append(Block(_norm(hidden), attention, _norm(hidden), feedforward, 0.0))  # type: ignore[arg-type]
        self.blocks = nn.ModuleList(blocks)
        self.norm = _norm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class SharedMixture(nn.Module):
    """A mixture of experts, and the shared experts that every token goes to."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, shared: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = GroupedExperts(hidden, inner, experts)
        self.shared = FeedForward(hidden, shared, "swiglu", bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        tokens = x.flatten(0, -2)
        out: Tensor = self.experts(tokens, chosen.flatten(0, -2), weights.flatten(0, -2)).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class GroupedExperts(nn.Module):
    """Experts as Megatron-Core computes them with fused kernels: one grouped product for gate and up, whose activation
    also multiplies by the weights of the tokens, and one for down; one kernel permutes rows, one adds them up."""

    def __init__(self, hidden: int, inner: int, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.gate_up = nn.Parameter(torch.empty(number, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(number, hidden, inner))

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        flat = choices.reshape(-1)
        order = flat.argsort(stable=True)
        ends = flat.new_zeros(self.num_experts).scatter_add(0, flat, torch.ones_like(flat)).cumsum(0).int()
        places = order // choices.shape[-1]
        rows = tokens.index_select(0, places)
        gate, up = grouped_product(rows, self.gate_up, ends).chunk(2, dim=-1)
        out = grouped_product(F.silu(gate) * up, self.down, ends)
        # Only the cost matters: the weights are used at all, so that the router has gradients.
        return torch.zeros_like(tokens).index_add(0, places, out.to(tokens.dtype)) * weights.sum()


class WideAttention(nn.Module):
    """Attention with heads of any width. With a `window`, a token sees as many tokens as the window has."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, width: int, window: int) -> None:
        super().__init__()
        self.width = width
        self.window = window
        self.q = nn.Linear(hidden, heads * width, bias=False)
        self.k = nn.Linear(hidden, kv_heads * width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * width, bias=False)
        self.o = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.width)).transpose(-3, -2) for project in (self.q, self.k, self.v))
        table = rotation(x.shape[-2], self.width, _ROTARY_BASE, x.device, q.dtype)
        q, k = rotate(q, table), rotate(k, table)
        if self.window:  # pieces of the sequence, each of which attends to itself, cost as much as a sliding window
            q, k, v = (part.unflatten(-2, (-1, self.window)).transpose(-4, -3).flatten(0, 1) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not self.window, enable_gqa=True)
        if self.window:
            mixed = mixed.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2, 3)
        out: Tensor = self.o(mixed.transpose(-3, -2).flatten(-2))
        return out


class LatentAttention(nn.Module):
    """DeepSeek's attention: queries, and keys and values, are projected by two matrices of low rank each."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_down = nn.Linear(hidden, _LATENT_QUERIES, bias=False)
        self.q_norm = _norm(_LATENT_QUERIES)
        self.q = nn.Linear(_LATENT_QUERIES, heads * _KEY_WIDTH, bias=False)
        self.kv_down = nn.Linear(hidden, _LATENT_KEYS + _ROTARY_WIDTH, bias=False)
        self.kv_norm = _norm(_LATENT_KEYS + _ROTARY_WIDTH)
        self.kv = nn.Linear(_LATENT_KEYS + _ROTARY_WIDTH, heads * 2 * _EVEN_WIDTH, bias=False)
        self.o = nn.Linear(heads * _EVEN_WIDTH, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.q_norm(self.q_down(x))).unflatten(-1, (-1, _KEY_WIDTH)).transpose(-3, -2)
        kv = self.kv(self.kv_norm(self.kv_down(x))).unflatten(-1, (-1, 2 * _EVEN_WIDTH)).transpose(-3, -2)
        k, v = kv.chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(q[..., :_EVEN_WIDTH], k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(-3, -2).flatten(-2))
        return out


def _norm(hidden: int) -> nn.Module:
    return nn.RMSNorm(hidden, EPSILON)


def mixture_forward(arguments: dict[str, Any], length: int) -> tuple[float, float, float]:
    """The forward FLOPs of one sample of `length` tokens: of all blocks, of the head, and of the pairs of tokens in
    attention, which are part of those of the blocks."""
    layers, hidden, heads = arguments["layers"], arguments["hidden"], arguments["heads"]
    width, latent = arguments.get("width", 128), arguments.get("latent", False)
    if latent:
        down = hidden * (_LATENT_QUERIES + _LATENT_KEYS + _ROTARY_WIDTH)
        up = heads * (_LATENT_QUERIES * _KEY_WIDTH + _LATENT_KEYS * 2 * 128)
        projections, width = down + up + heads * 128 * hidden, _EVEN_WIDTH
    else:
        projections = 2 * hidden * width * (heads + (arguments.get("kv_heads") or heads))
    window = arguments.get("window", 0)
    keys = (length + window) / 2 if window else length
    pairs = layers * 4.0 * length * keys * heads * width
    inner = arguments["inner"] * arguments["top_k"] + arguments.get("shared", 0)
    dense = arguments.get("dense_layers", 0)
    weights = dense * 3 * hidden * arguments.get("dense", 0)
    weights += (layers - dense) * hidden * (3 * inner + arguments["experts"])
    blocks = pairs + 2.0 * length * (layers * projections + weights)
    return blocks, 2.0 * length * hidden * arguments["vocabulary"], pairs
