"""What ranks call differently raises an error on every rank, with both sides, and later operations work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright.compat.horovod as hvd
from meshwright.compat.horovod.exceptions import MismatchError
from tests.compat.horovod.world import run_horovod
from tests.ranks import RankPool


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    assert isinstance(caught.value, MismatchError)
    return str(caught.value)


def _mismatches() -> list[str]:
    rank = hvd.rank()
    last = rank == hvd.size() - 1
    dtype = torch.int32 if last else torch.float32
    messages = [
        _message(lambda: hvd.allreduce(torch.ones(2 + last))),
        _message(lambda: hvd.allreduce(torch.ones(2, dtype=dtype), name="types")),
        _message(lambda: hvd.allreduce(torch.ones(2), op=hvd.Min if last else hvd.Max)),
        _message(lambda: hvd.allgather(torch.ones(1, 2 + last))),
        _message(lambda: hvd.broadcast(torch.ones(2), int(last))),
        _message(lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + last))),
        _message(lambda: hvd.reducescatter(torch.ones(3 + last))),
        _message(lambda: hvd.grouped_allreduce([torch.ones(1)] * (1 + last))),
        _message(lambda: (hvd.allgather if last else hvd.allreduce)(torch.ones(2), name="kinds")),
    ]
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [float(hvd.size())] * 2
    return messages


@pytest.mark.parametrize("count", [2, 3])
def test_mismatches_are_raised_on_every_rank_with_both_sides(count: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue({2: "two", 3: "three"}[count])
    results = run_horovod(pool, _mismatches)
    assert all(messages == results[0] for messages in results)
    last = count - 1
    expected = [
        f"rank 0 called it with (2,), rank {last} with (3,)",
        f"rank 0 called it with float32, rank {last} with int32",
        f"rank 0 called it with Max, rank {last} with Min",
        f"shapes after the first dimension in allgather.noname.2: rank 0 called it with (2,), rank {last} with (3,)",
        f"mismatched root ranks in broadcast.noname.3: rank 0 called it with 0, rank {last} with 1",
        "shapes after the first dimension",
        f"rank 0 called it with (3,), rank {last} with (4,)",
        "mismatched",
        f"the name kinds: rank 0 called allreduce, rank {last} allgather",
    ]
    for message, text in zip(results[0], expected, strict=True):
        assert text in message


def _duplicates() -> None:
    if hvd.rank() == 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
        with pytest.raises(ValueError, match=r"allreduce.twice.*\[\(3,\)\].*earlier call.*\[\(2,\)\]"):
            hvd.allreduce_async(torch.ones(3), name="twice")
        other = hvd.allgather_async(torch.ones(2), name="twice")  # another operation, so another name
        hvd.barrier()
    else:
        hvd.barrier()
        other = hvd.allgather_async(torch.ones(2), name="twice")
        first = hvd.allreduce_async(torch.ones(2), name="twice")
    assert hvd.synchronize(first).tolist() == [1.0, 1.0]
    assert len(hvd.synchronize(other)) == 2 * hvd.size()


def test_a_name_that_is_in_use_is_refused(two: RankPool) -> None:
    run_horovod(two, _duplicates)


def _refusals() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match="complex64"):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="rows"):
        hvd.allgather(torch.tensor(1.0))
    with pytest.raises(ValueError, match="rows"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="Adasum"):
        hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(3), splits=[4] * hvd.size())
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(3), splits=torch.ones(hvd.size()))
    if hvd.size() == 3:
        with pytest.raises(NotImplementedError, match="power of 2, not 3"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    else:
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)


def test_calls_that_no_rank_can_make_are_refused_at_once(world: RankPool | None) -> None:
    run_horovod(world, _refusals)


def _gather_after_join() -> None:
    if hvd.rank() == 0:
        hvd.join()
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"ranks \[0\] have joined"):
            hvd.allgather(torch.ones(1))
        hvd.join()
    assert hvd.allgather(torch.ones(1)).tolist() == [1.0] * hvd.size()


def test_only_reductions_go_on_after_a_rank_has_joined(two: RankPool) -> None:
    run_horovod(two, _gather_after_join)
