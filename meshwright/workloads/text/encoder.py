"""A BERT encoder: every token attends to all tokens, positions are learned, and norms follow the residual additions.

As in the decoder, a block takes one tensor and returns one, and every projection is a separate `nn.Linear`. As in
RoBERTa, there are no segment embeddings and no pooled token, because no loss compares pairs of sentences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.workloads.text.decoder import STD, Attention, FeedForward

EPSILON = 1e-12  # of BERT's norms


class Encoder(nn.Module):
    """Maps tokens (batch, length) to features (batch, length, hidden), for any length up to `sequence`."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        sequence: int,
        vocabulary: int,
        feedforward: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        inner_width = 4 * hidden if feedforward is None else feedforward
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "vocabulary": vocabulary}
        for name, count in {**sizes, "feedforward": inner_width}.items():
            if not isinstance(count, int) or count < 1:
                raise InputError(f"the encoder's {name} is {count!r}: write a whole number of at least 1")
        if hidden % heads:
            raise InputError(f"hidden({hidden}) is not divisible by heads({heads}): choose a multiple of the heads")
        self.sequence = sequence
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.norm = nn.LayerNorm(hidden, EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(EncoderBlock(hidden, heads, inner_width, dropout) for _ in range(layers))
        initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        if length > self.sequence:
            raise InputError(
                f"the batch is {length} tokens long, but the model has positions for sequence = {self.sequence}: "
                "shorten the data's sequence, or raise the model's"
            )
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return x


class EncoderBlock(nn.Module):
    """Attention and feed-forward layers, each added to the residual stream and followed by a norm."""

    def __init__(self, hidden: int, heads: int, inner_width: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, heads, True, dropout, None, causal=False)
        self.norm1 = nn.LayerNorm(hidden, EPSILON)
        self.feedforward = FeedForward(hidden, inner_width, "gelu", True)
        self.norm2 = nn.LayerNorm(hidden, EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        out: Tensor = self.norm2(x + self.dropout(self.feedforward(x)))
        return out


class MaskedLanguage(nn.Module):
    """An encoder with a head that returns logits (batch, length, vocabulary). The default sizes are those of BERT-base.
    The head shares the weight of the embedding."""

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        sequence: int = 512,
        vocabulary: int = 30522,
        feedforward: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(layers, hidden, heads, sequence, vocabulary, feedforward, dropout)
        self.transform = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, EPSILON)
        # The weight that nn.Linear creates is replaced at once by the embedding's: on meta it costs no memory.
        self.head = nn.Linear(hidden, vocabulary, device="meta")
        self.head.weight = self.encoder.embedding.weight
        self.head.bias = nn.Parameter(torch.zeros(vocabulary))
        initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.transform(self.encoder(tokens)), approximate="tanh"))
        logits: Tensor = self.head(x)
        return logits


def initialize(model: nn.Module) -> None:
    """Applies BERT's initialization: all matrices and embeddings from the same normal distribution, biases zero."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=STD)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
