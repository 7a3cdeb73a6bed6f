"""Collectives of plain values between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.messages.exchange import all_gather_values, broadcast_value, from_bytes_tensor, to_bytes_tensor
from meshwright.messages.plain_values import DamagedValueError, NotPlainError
from tests.ranks import RankPool, ranks


def gather_and_broadcast(rank: int, world_size: int, values: list[Any]) -> tuple[list[Any], list[Any]]:
    return all_gather_values(values[rank]), [broadcast_value(values[rank], source=source) for source in (0, 2)]


@pytest.mark.parametrize(
    "values",
    [
        [None, None, None],
        ["", "x" * 100_000, ("ä", {"a": {1: 2.5}})],
        [None, [float("inf"), (1, 2)], {"loss": torch.tensor(0.1, dtype=torch.float64)}],
    ],
    ids=["none", "sizes", "types"],
)
def test_values_reach_every_rank(three: RankPool, values: list[Any]) -> None:
    expected = repr((values, [values[0], values[2]]))
    assert [repr(result) for result in three.run(gather_and_broadcast, values)] == [expected] * 3


def gather_and_broadcast_alone(rank: int, world_size: int, value: Any) -> tuple[list[Any], Any]:
    return all_gather_values(value), broadcast_value(value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_group_that_sends_from_gpus_only() -> None:
    with ranks(1, backend="nccl") as pool:
        assert pool.run(gather_and_broadcast_alone, {"a": (1, 2.5)}) == [([{"a": (1, 2.5)}], {"a": (1, 2.5)})]


def within_groups(rank: int, world_size: int) -> tuple[list[Any], Any] | None:
    groups = {members: dist.new_group(list(members)) for members in ((1, 2), (0,))}
    for members, group in groups.items():
        if rank in members:
            last = len(members) - 1
            return all_gather_values({"rank": rank}, group), broadcast_value(f"of rank {rank}", group, source=last)
    raise AssertionError


def test_groups_of_some_ranks(three: RankPool) -> None:
    of_two = ([{"rank": 1}, {"rank": 2}], "of rank 2")
    assert three.run(within_groups) == [([{"rank": 0}], "of rank 0"), of_two, of_two]


def broadcast_what_only_rank_0_can_send(rank: int, world_size: int) -> Any:
    return broadcast_value("plain" if rank == 0 else object())


def test_only_the_source_of_a_broadcast_has_to_be_plain(two: RankPool) -> None:
    assert two.run(broadcast_what_only_rank_0_can_send) == ["plain", "plain"]


def test_one_process_without_a_process_group() -> None:
    assert not dist.is_initialized()
    value = {"a": object()}
    assert all_gather_values(value) == [value]
    assert broadcast_value(value) is value
    assert all_gather_values(None) == [None]


def test_values_as_tensors_of_bytes() -> None:
    data = to_bytes_tensor({"a": (1, None)})
    assert (data.dtype, data.dim()) == (torch.uint8, 1)
    assert from_bytes_tensor(data) == {"a": (1, None)}
    with pytest.raises(DamagedValueError):
        from_bytes_tensor(data[:-1])
    with pytest.raises(DamagedValueError):
        from_bytes_tensor(torch.empty(0, dtype=torch.uint8))
    with pytest.raises(NotPlainError):
        to_bytes_tensor(object())
