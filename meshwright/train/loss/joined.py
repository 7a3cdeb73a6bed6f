"""`JoinedLoss`: a user's loss that compares the samples of a batch with each other, over the samples of all ranks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.parallel.context.sequence_view import gather_sequence_views
from meshwright.train.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten

Across = Callable[[Tensor], tuple[Tensor, int]]


class JoinedLoss:
    """Calls a loss function with the outputs and targets of all ranks, in the order of the ranks (after `joined`), or
    with those of one rank. `has_samples` says for each tensor of the output whether its first dimension is that of the
    samples. The value is multiplied by the number of this rank's samples, as `Loss` expects of losses that compare
    samples: the sum over ranks is then divided by the number of all samples."""

    def __init__(
        self, function: Callable[[Any, Any], Any], has_samples: tuple[bool, ...], across: Across | None = None
    ) -> None:
        self._function = function
        self._has_samples = has_samples
        self._across = across

    def joined(self, across: Across) -> "JoinedLoss":
        """Returns the loss over the samples of all ranks. `across` returns the rows of all ranks."""
        return JoinedLoss(self._function, self._has_samples, across)

    def __call__(self, output: Any, target: Any) -> Tensor:
        samples = count_rows(target)
        if self._across is not None:
            output, target = self._outputs_of_all_ranks(output), self._targets_of_all_ranks(target, samples)
        value: Tensor = self._function(output, target)
        return value * samples

    def _outputs_of_all_ranks(self, output: Any) -> Any:
        leaves, structure = tree_flatten(gather_sequence_views(output))  # full sequences of this rank's samples
        gathered = [self._gather(leaf) if has else leaf for leaf, has in zip(leaves, self._has_samples, strict=True)]
        return tree_unflatten(gathered, structure)

    def _targets_of_all_ranks(self, target: Any, samples: int) -> Any:
        def gather(value: Any) -> Any:
            has_samples = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == samples
            return self._gather(value) if has_samples else value

        return tree_map(gather, target)

    def _gather(self, rows: Tensor) -> Tensor:
        assert self._across is not None
        return self._across(rows)[0]


def count_rows(target: Any) -> int:
    """Returns the number of samples of a target: the most frequent size of dimension 0 among its tensors."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return max(set(sizes), key=sizes.count) if sizes else 1
