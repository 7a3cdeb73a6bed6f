"""A deep learning recommendation model (DLRM, Naumov et al. 2019, arXiv:1906.00091): many embedding tables for
categories beside dense layers for numbers, whose vectors are multiplied with each other."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.errors import InputError


class DLRM(nn.Module):
    """Maps integers (batch, integers) and hashes of categories (batch, categories) to one score (batch,), whose
    sigmoid is the probability of a click.

    Each category has a table of `rows` vectors (one number for all tables, or one for each), and a hash selects the row
    hash mod rows. `bottom` and `top` are the widths of the layers before and after the products. With `sparse`,
    gradients of tables have only the rows that a batch looks up, and the optimizer must support sparse gradients (SGD,
    Adagrad, SparseAdam)."""

    def __init__(
        self,
        rows: int | Sequence[int] = 1_000_000,
        dim: int = 64,
        integers: int = 13,
        categories: int = 26,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (1024, 1024, 512, 256),
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.rows = [rows] * categories if isinstance(rows, int) else list(rows)
        if len(self.rows) != categories:
            raise InputError(f"the model's rows has {len(self.rows)} numbers, but categories is {categories}")
        widths = {"rows": self.rows, "dim": [dim], "integers": [integers], "bottom": bottom, "top": top}
        for name, numbers in widths.items():
            if any(number < 1 for number in numbers):
                raise InputError(f"the model's {name} is {list(numbers)}: write whole numbers of at least 1")
        self.tables = nn.ModuleList(nn.Embedding(count, dim, sparse=sparse) for count in self.rows)
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
        vectors = categories + 1
        self.bottom = _layers([integers, *bottom, dim], ends_in_relu=True)
        self.top = _layers([dim + vectors * (vectors - 1) // 2, *top, 1], ends_in_relu=False)

    def forward(self, integers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(integers)
        columns = zip(self.tables, categories.unbind(1), self.rows, strict=True)
        looked_up = [table(hashes % count) for table, hashes, count in columns]
        products = _products_of_pairs(torch.stack([dense, *looked_up], dim=1))
        score: Tensor = self.top(torch.cat([dense, products], dim=1))
        return score.squeeze(1)


def _products_of_pairs(vectors: Tensor) -> Tensor:
    """Returns the dot products of all pairs of different vectors of a sample, (batch, pairs), of vectors (batch, count,
    dim)."""
    count = vectors.shape[1]
    products = vectors @ vectors.transpose(1, 2)
    first, second = torch.tril_indices(count, count, offset=-1, device=vectors.device)
    return products[:, first, second]


def _layers(widths: Sequence[int], ends_in_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last one if `ends_in_relu`."""
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*(layers if ends_in_relu else layers[:-1]))


class AreaUnderCurve:
    """The area under the ROC curve: the probability that a sample with a click has a larger score than one without.

    Scores are counted in `bins` of equal width between the probabilities 0 and 1, so that the counts of batches and
    ranks can be added up. Scores in the same bin count as equal (one half). If all samples have the same label, the
    area is not defined, and 0.5 is returned."""

    def __init__(self, bins: int = 20_000) -> None:
        self.bins = bins

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the number of samples (2, bins) by label and bin."""
        bin_numbers = (output.double().sigmoid() * self.bins).long().clamp(max=self.bins - 1)
        numbers = target.long() * self.bins + bin_numbers
        return torch.bincount(numbers, minlength=2 * self.bins).reshape(2, self.bins)

    def finish(self, total: Tensor) -> float:
        """Returns the area for the sum of all batches' counts."""
        negatives, positives = total
        pairs = float(negatives.sum() * positives.sum())
        smaller = negatives.cumsum(0) - negatives
        return float((positives * (smaller + negatives / 2)).sum()) / pairs if pairs else 0.5
