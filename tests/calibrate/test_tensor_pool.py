"""Which results of earlier calls a rank keeps in memory while its operators are measured."""

import torch

from meshwright.calibrate.operator_calls import TensorPool


def sizes(pool: TensorPool) -> list[int]:
    return [size for size, _ in pool.latest_results]


def test_a_backward_pass_keeps_only_the_gradients_that_are_still_to_be_read() -> None:
    pool = TensorPool(torch.device("cpu"))
    for size in (1, 2, 3, 2):
        pool.store(torch.zeros(size))
    assert sizes(pool) == [1, 3, 2], "a forward pass keeps the latest result of each size"
    for size, kept in ((4, [2, 4]), (3, [4, 3]), (4, [3, 4])):
        pool.store(torch.zeros(size), backward=True)
        assert sizes(pool) == kept
    pool.clear()
    assert sizes(pool) == []
