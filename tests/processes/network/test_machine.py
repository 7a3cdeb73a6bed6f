"""Ranks on several machines are numbered machine by machine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from meshwright.processes.network.machine import machine_name, order_by_machine, rank_by_machine


@pytest.mark.parametrize(
    ("machines", "order"),
    [
        ("aabb", []),
        ("a", []),
        ("abab", [0, 2, 1, 3]),
        ("bbaa", []),  # the machine of rank 0 comes first
        ("abbac", [0, 3, 1, 2, 4]),
    ],
)
def test_ranks_are_ordered_by_the_lowest_rank_of_their_machine(machines: str, order: list[int]) -> None:
    assert order_by_machine(list(machines)) == order


@pytest.mark.parametrize(
    ("machines", "numbers"), [("abab", [(0, 2), (2, 2), (1, 2), (3, 2)]), ("aaab", [(0, 3), (1, 3), (2, 3), (3, 1)])]
)
def test_every_rank_gets_its_number_and_the_size_of_its_machine_through_the_store(
    machines: str, numbers: list[tuple[int, int]]
) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(machines)) as pool:
        given = pool.map(lambda rank: rank_by_machine(rank, len(machines), store, 10, machines[rank]), range(4))
        assert list(given) == numbers


def test_all_processes_of_a_machine_have_the_same_name() -> None:
    assert machine_name() == machine_name() != ""
