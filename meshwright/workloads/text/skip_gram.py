"""Skip-gram with negative sampling (Mikolov et al. 2013, arXiv:1310.4546): words shall be near each other that stand
near each other. A word's vector c points to those o of the words around it, and away from others, drawn by chance:

    − log σ(c · o) − Σ log σ(− c · oₖ)                                            `NegativeSampling`
"""

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError


class SkipGram(nn.Module):
    """`center` holds the vectors that one wants, `context` those of the words around them. `sparse`: gradients have the
    rows alone that a batch looks up; the optimizer must take such (SGD, Adagrad, SparseAdam)."""

    def __init__(self, vocabulary: int, dim: int = 300, sparse: bool = False) -> None:
        super().__init__()
        for name, count in (("vocabulary", vocabulary), ("dim", dim)):
            if not isinstance(count, int) or count < 1:
                raise InputError(f"the model's {name} is {count!r}: write a whole number from 1 on")
        self.center = nn.Embedding(vocabulary, dim, sparse=sparse)
        self.context = nn.Embedding(vocabulary, dim, sparse=sparse)
        nn.init.uniform_(self.center.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.context.weight)

    def forward(self, centers: Tensor, contexts: Tensor) -> Tensor:
        """Words (batch, centers) and, for each, (batch, centers, 1 + negatives), to how well these go together."""
        return (self.center(centers).unsqueeze(-2) * self.context(contexts)).sum(-1)


class NegativeSampling(nn.Module):
    """The mean over words of the formula above. Targets are 1 for a word that was there, 0 for one that was drawn."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none")
        return losses.sum(-1).mean()


def found_first(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The share of words for which the true neighbour goes better with them than every one that was drawn."""
    best = output.argmax(-1, keepdim=True)
    return target.gather(-1, best).sum(), best.numel()
