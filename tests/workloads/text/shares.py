"""What every data set with chance in it must keep: the same samples on any number of ranks, and after a resume."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshwright.data.loading import LoadingOptions, SampleShare, train_batches


def loaded(dataset: Any, ranks: int, start: tuple[int, int] = (0, 0), batch: int = 8) -> list[list[Tensor]]:
    """The tensors of global batches from `start` to the end of epoch 1, put together from what the ranks get."""
    parts = [
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
    return [_joined([part for one in together for part in one.microbatches]) for together in zip(*parts, strict=True)]


def _joined(parts: Iterable[Any]) -> list[Tensor]:
    leaves = [tree_leaves(part.data) for part in parts if part.samples]
    return [torch.cat(same) for same in zip(*leaves, strict=True)]


def same(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def assert_same_everywhere(dataset: Any) -> None:
    alone = loaded(dataset, 1)
    half = len(alone) // 2
    assert half * 2 == len(alone)  # two epochs
    assert all(same(loaded(dataset, ranks), alone) for ranks in (2, 4))
    assert same(loaded(dataset, 2, start=(1, 1)), alone[half + 1 :])
