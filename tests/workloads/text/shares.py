"""Checks that a data set with random samples gives the same samples on any number of ranks and after a resume."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshwright.data.loading import LoadingOptions, Microbatch, SampleShare, train_batches


def load_global_batches(
    dataset: Any, ranks: int, start: tuple[int, int] = (0, 0), batch: int = 8
) -> list[list[Tensor]]:
    """The tensors of all global batches from `start` to the end of epoch 1, concatenated from the ranks' shares."""
    batches_of_ranks = [
        train_batches(
            dataset,
            seed=5,
            global_batch=batch,
            share=SampleShare(rank, ranks),
            loading=LoadingOptions(),
            start=start,
            epochs=2,
        )
        for rank in range(ranks)
    ]
    return [
        _concatenate([microbatch for batch in shares for microbatch in batch.microbatches])
        for shares in zip(*batches_of_ranks, strict=True)
    ]


def _concatenate(microbatches: Iterable[Microbatch]) -> list[Tensor]:
    leaves = [tree_leaves(microbatch.data) for microbatch in microbatches if microbatch.samples]
    return [torch.cat(tensors) for tensors in zip(*leaves, strict=True)]


def are_equal(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for pair in zip(first, second, strict=True) for a, b in zip(*pair, strict=True)
    )


def assert_independent_of_ranks(dataset: Any) -> None:
    """Checks that 1, 2 and 4 ranks load the same global batches, also when they start in the middle of epoch 1."""
    one_rank = load_global_batches(dataset, 1)
    epoch_length = len(one_rank) // 2
    assert epoch_length * 2 == len(one_rank)  # two epochs
    assert all(are_equal(load_global_batches(dataset, ranks), one_rank) for ranks in (2, 4))
    assert are_equal(load_global_batches(dataset, 2, start=(1, 1)), one_rank[epoch_length + 1 :])
