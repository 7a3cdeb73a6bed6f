"""Skip-gram with negative sampling (Mikolov et al. 2013, arXiv:1310.4546).

Words that occur near each other get similar vectors. For the vector c of a word, o of a neighbour in the text and oₖ of
randomly drawn words (the negatives), the loss is

    − log σ(c · o) − Σ log σ(− c · oₖ)                                            `NegativeSampling`
"""

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError


class SkipGram(nn.Module):
    """Scores how likely words occur near each other. The table `center` holds the word vectors that are the result of
    training, the table `context` the vectors of words as neighbours. With `sparse`, gradients have only the rows that a
    batch looks up, and the optimizer must support sparse gradients (SGD, Adagrad, SparseAdam)."""

    def __init__(self, vocabulary: int, dim: int = 300, sparse: bool = False) -> None:
        super().__init__()
        for name, count in (("vocabulary", vocabulary), ("dim", dim)):
            if not isinstance(count, int) or count < 1:
                raise InputError(f"the model's {name} is {count!r}: write a whole number of at least 1")
        self.center = nn.Embedding(vocabulary, dim, sparse=sparse)
        self.context = nn.Embedding(vocabulary, dim, sparse=sparse)
        nn.init.uniform_(self.center.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.context.weight)

    def forward(self, centers: Tensor, contexts: Tensor) -> Tensor:
        """Returns the scores (batch, centers, 1 + negatives) of the words `centers` (batch, centers) with the words
        `contexts` (batch, centers, 1 + negatives)."""
        return (self.center(centers).unsqueeze(-2) * self.context(contexts)).sum(-1)


class NegativeSampling(nn.Module):
    """The mean over words of the loss in the module's docstring. Targets are 1 for a neighbour in the text, 0 for a
    negative."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none")
        return losses.sum(-1).mean()


def found_first(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Returns for how many words the true neighbour has a larger score than all negatives, and the number of words."""
    best = output.argmax(-1, keepdim=True)
    return target.gather(-1, best).sum(), best.numel()
