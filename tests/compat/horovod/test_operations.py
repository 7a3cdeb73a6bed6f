"""Every operation gives what Horovod documents, on one, two and three ranks."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright.compat.horovod as hvd
from meshwright.compat.horovod.variables import read_horovod_variables
from tests.compat.horovod.world import run_horovod
from tests.ranks import RankPool

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reductions() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    for dtype in (*DTYPES, *FLOATS):
        for shape in ((), (5,), (3, 4), (0,), (70_000,)):
            tensor = torch.full(shape, rank + 1, dtype=dtype)
            expected = {
                hvd.Sum: total,
                hvd.Average: total // size if dtype in DTYPES else total / size,
                hvd.Min: 1,
                hvd.Max: size,
                hvd.Product: torch.arange(1, size + 1).prod().item(),
            }
            for op, value in expected.items():
                result = hvd.allreduce(tensor, op=op)
                torch.testing.assert_close(result, torch.full(shape, value, dtype=dtype))
            assert torch.equal(tensor, torch.full(shape, rank + 1, dtype=dtype)), "the input does not change"


def in_place_grouped_and_scaled() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(size)))
    tensor = torch.full((4,), float(rank))
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert tensor.tolist() == [total] * 4
    group = [torch.full((3,), float(rank)), torch.full((2, 2), rank, dtype=torch.int64)]
    summed = hvd.grouped_allreduce(group, op=hvd.Sum)
    assert summed[0].tolist() == [total] * 3
    assert summed[1].tolist() == [[total] * 2] * 2
    assert hvd.grouped_allreduce_(group, op=hvd.Sum)[1] is group[1]
    assert group[0].tolist() == [total] * 3
    ones = torch.ones(3)
    assert hvd.allreduce(ones, op=hvd.Sum, prescale_factor=2, postscale_factor=3).tolist() == [6.0 * size] * 3
    whole = torch.full((2,), 5, dtype=torch.int32)
    assert hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5).tolist() == [2 * size] * 2, "integers are truncated"
    assert hvd.allreduce(ones, compression=hvd.Compression.fp16).tolist() == [1.0] * 3
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(ones, average=False).tolist() == [float(size)] * 3
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(ones, average=False, op=hvd.Sum)


def other_orders_and_handles() -> None:
    rank, size = hvd.rank(), hvd.size()
    names = [f"tensor {number}" for number in range(40)]
    order = names if rank % 2 == 0 else names[::-1]
    handles = {name: hvd.allreduce_async(torch.full((number + 1,), 1.0), name=name) for number, name in _by(order)}
    for number, name in _by(names):
        assert hvd.synchronize(handles[name]).tolist() == [1.0] * (number + 1)
        assert hvd.synchronize(handles[name]) is None, "it was synchronized already"
    late = hvd.allreduce_async_(torch.ones(2), name="polled", op=hvd.Sum)
    while not hvd.poll(late):
        time.sleep(0)
    assert hvd.synchronize(late).tolist() == [float(size)] * 2
    gathers = hvd.allgather_async(torch.full((1,), rank)), hvd.broadcast_async(torch.tensor([rank]), size - 1)
    hvd.barrier()
    assert [hvd.synchronize(handle).tolist() for handle in gathers] == [list(range(size)), [size - 1]]


def _by(names: list[str]) -> list[tuple[int, str]]:
    return [(int(name.split()[1]), name) for name in names]


def moves() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*DTYPES, *FLOATS, torch.bool):
        rows = torch.full((rank, 2), rank, dtype=dtype)  # rank 0 has none
        expected = torch.cat([torch.full((other, 2), other, dtype=dtype) for other in range(size)])
        assert torch.equal(hvd.allgather(rows), expected)
        assert torch.equal(
            hvd.broadcast(torch.full((3,), rank, dtype=dtype), size - 1), torch.full((3,), size - 1).to(dtype)
        )
    one, two = hvd.grouped_allgather([torch.full((1,), rank), torch.full((2, 1), float(rank))])
    assert one.tolist() == list(range(size))
    assert two.flatten().tolist() == [float(other) for other in range(size) for _ in range(2)]
    target = torch.full((2,), float(rank))
    assert hvd.broadcast_(target, 0) is target
    assert target.tolist() == [0.0, 0.0]
    received, splits = hvd.alltoall(torch.arange(size * (rank + 1)), splits=[rank + 1] * size)
    assert splits.tolist() == [other + 1 for other in range(size)]
    parts = [torch.arange(size * (other + 1))[rank * (other + 1) : (rank + 1) * (other + 1)] for other in range(size)]
    assert torch.equal(received, torch.cat(parts))
    assert hvd.alltoall(torch.full((size, 2), rank)).tolist() == [[other, other] for other in range(size)]


def scatters() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = 2 * size + 1  # rank 0 gets one row more
    tensor = torch.arange(rows * 2, dtype=torch.float64).view(rows, 2)
    begin = rank * 2 + min(rank, 1)
    own = tensor[begin : begin + 2 + (rank == 0)]
    assert torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), own * size)
    assert torch.equal(hvd.reducescatter(tensor), own)
    grouped = hvd.grouped_reducescatter([tensor, tensor * 2], op=hvd.Sum, postscale_factor=0.5)
    assert torch.equal(grouped[1], own * size)
    handle = hvd.grouped_reducescatter_async([tensor], op=hvd.Max, prescale_factor=2.0)
    assert torch.equal(hvd.synchronize(handle)[0], own * 2)
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(tensor)), own)


def gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    weights = torch.arange(1.0, 4.0, dtype=torch.float64) * (rank + 1)
    mean_of_ranks = (size + 1) / 2

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], rows: int = 3) -> list[float]:
        x = torch.ones(rows, dtype=torch.float64, requires_grad=True)
        y = function(x)
        y.backward(weights[: len(y)] if len(y) <= 3 else torch.full_like(y, rank + 1))
        assert x.grad is not None
        result: list[float] = x.grad.tolist()
        return result

    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Average)) == [mean_of_ranks * k for k in (1, 2, 3)]
    assert gradient(lambda x: hvd.grouped_allreduce([x, x])[0]) == [mean_of_ranks * k for k in (1, 2, 3)]
    assert gradient(lambda x: hvd.allgather(x.repeat(2))) == [2 * mean_of_ranks] * 3
    expected = [mean_of_ranks * k if rank == 0 else 0.0 for k in (1, 2, 3)]
    assert gradient(lambda x: hvd.broadcast(x, 0)) == expected
    assert gradient(lambda x: hvd.alltoall(x.repeat(2), [1] * size)[0][:0].sum().view(1) + x.sum()) == [rank + 1.0] * 3
    scattered = gradient(lambda x: hvd.reducescatter(x.repeat(size), op=hvd.Sum)[:3])
    assert scattered == [size * k * sum(range(1, size + 1)) for k in (1.0, 2.0, 3.0)]


def objects_and_parameters() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"of": rank}, size - 1) == {"of": size - 1}
    assert hvd.allgather_object(["x"] * rank) == [["x"] * other for other in range(size)]
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.get_parameter("0.weight").data = torch.full((2, 3), float(rank)).t()  # not contiguous
    hvd.broadcast_parameters(model.state_dict(), size - 1)
    assert torch.equal(model.get_parameter("0.weight"), torch.full((3, 2), size - 1.0))
    hvd.broadcast_parameters(model.named_parameters(), 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    moments = [state["exp_avg_sq"].sum() for state in optimizer.state.values()]
    assert len(moments) == 4
    assert len({tuple(values) for values in hvd.allgather_object(tuple(map(float, moments)))}) == 1
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(torch.ones(1), 0)


def sparse_tensors() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), torch.tensor([1.0, 2.0]), (5,))
    dense = [size, *(2.0 if position < size else 0.0 for position in range(4))]
    assert hvd.sparse_allreduce_async(tensor, "sparse", hvd.Sum)().to_dense().tolist() == dense
    average = hvd.sparse_allreduce_async(tensor, "sparse", hvd.Average)().to_dense()
    torch.testing.assert_close(average, torch.tensor(dense) / size)


def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set(list(range(size)))
    if size == 1:
        return  # the set of all ranks is the only one
    evens = hvd.add_process_set(range(0, size, 2))
    assert evens.size() == -(-size // 2)
    assert evens.included() == (rank % 2 == 0)
    if evens.included():
        assert evens.rank() == rank // 2
        expected = float(sum(range(0, size, 2)))
        assert hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum, process_set=evens).tolist() == [expected] * 2
        assert hvd.allgather(torch.tensor([rank]), process_set=evens).tolist() == list(range(0, size, 2))
        assert hvd.broadcast(torch.tensor([rank]), 0, process_set=evens).item() == 0
        hvd.barrier(evens)
    else:
        with pytest.raises(ValueError, match="not in"):
            hvd.allreduce(torch.ones(1), process_set=evens)
    with pytest.raises(ValueError, match="at most once"):
        hvd.add_process_set([size])
    assert hvd.remove_process_set(evens)
    assert not hvd.remove_process_set(evens)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.global_process_set.size() == size
    with pytest.raises(ValueError, match="no process set"):
        hvd.allreduce(torch.ones(1), process_set=evens)


def joins_with_uneven_data() -> None:
    rank, size = hvd.rank(), hvd.size()
    for _round in range(2):
        for batch in range(rank + 1):  # the last rank has the most
            averaged = hvd.allreduce(torch.ones(3), name="gradient")
            torch.testing.assert_close(averaged, torch.full((3,), (size - batch) / size))
            lowest = hvd.allreduce(torch.tensor([float(rank)]), name="lowest", op=hvd.Min)
            assert lowest.item() == float(batch), "ranks that have joined change no minimum"
        assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def batch_norm() -> None:
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    counts = [2 + other for other in range(size)]
    batch = torch.randn(sum(counts), 3, 4, dtype=torch.float64)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    ours, whole = hvd.SyncBatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    x, y = batch[own].clone().requires_grad_(), batch.clone().requires_grad_()
    torch.testing.assert_close(ours(x), (expected := whole(y))[own])
    torch.testing.assert_close(ours.running_mean, whole.running_mean)
    torch.testing.assert_close(ours.running_var, whole.running_var)
    ours(x).pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert ours.weight.grad is not None
    torch.testing.assert_close(x.grad, y.grad[own])
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), whole.weight.grad)
    mean, variance = ours.running_mean, ours.running_var
    expected = torch.nn.functional.batch_norm(x, mean, variance, ours.weight, ours.bias)
    torch.testing.assert_close(ours.eval()(x), expected)


def questions() -> None:
    assert hvd.is_initialized()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()))
    assert isinstance(hvd.nccl_built(), int)
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()


@pytest.mark.parametrize(
    "check",
    [
        *(reductions, in_place_grouped_and_scaled, other_orders_and_handles, moves, scatters, gradients),
        *(objects_and_parameters, sparse_tensors, process_sets, joins_with_uneven_data, batch_norm, questions),
    ],
)
def test_operation(world: RankPool | None, check: Callable[[], None]) -> None:
    run_horovod(world, check)


def _timeline(file: str) -> None:
    hvd.start_timeline(file, mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="traced")
    hvd.stop_timeline()


def test_the_timeline_is_a_chrome_trace(world: RankPool | None, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    run_horovod(world, _timeline, str(file))
    events = json.loads(file.read_text())
    names = [event.get("name") for event in events]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= set(names)
    assert "allreduce.traced" in [event["args"].get("name") for event in events if "args" in event]
    assert any("start_time_since_epoch_in_micros" in event.get("args", {}) for event in events)
    phases = [event["ph"] for event in events]
    assert phases.count("B") == phases.count("E")


def _init_again() -> tuple[int, int]:
    for number in range(3):
        assert hvd.allreduce(torch.full((2,), float(number))).tolist() == [float(number)] * 2
        pending = hvd.allreduce_async(torch.ones(1), name="left behind") if hvd.rank() == 0 and hvd.size() > 1 else None
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match=r"use hvd.init"):
            hvd.rank()
        if pending is not None:
            with pytest.raises(hvd.HorovodInternalError, match="shut"):
                hvd.synchronize(pending)
        hvd.init()
        hvd.init()  # does nothing
    if hvd.size() > 1:
        sets = [hvd.ProcessSet([0])]
        hvd.shutdown()
        hvd.init(process_sets=sets)
        assert sets[0].size() == 1
    return hvd.rank(), hvd.size()


def test_init_and_shutdown_can_be_repeated(world: RankPool | None) -> None:
    results = run_horovod(world, _init_again)
    assert results == [(rank, len(results)) for rank in range(len(results))]


def _some_ranks() -> list[int] | None:
    hvd.shutdown()
    if _launched_rank() == 1:
        with pytest.raises(ValueError, match="not among these ranks"):
            hvd.init(comm=[2, 0])
        return None
    hvd.init(comm=[2, 0])
    gathered: list[int] = hvd.allgather(torch.tensor([_launched_rank()])).tolist()
    return gathered


def _launched_rank() -> int:
    return read_horovod_variables().rank


def test_init_with_some_ranks_numbers_them_in_their_order(three: RankPool) -> None:
    assert run_horovod(three, _some_ranks) == [[2, 0], None, [2, 0]]


class Communicator:
    """The part of a communicator of mpi4py that `hvd.init` needs, over the process group of the pool."""

    def Get_rank(self) -> int:
        return dist.get_rank()

    def Get_size(self) -> int:
        return dist.get_world_size()

    def allgather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def bcast(self, value: Any, root: int) -> Any:
        return self.allgather(value)[root]


def _communicator() -> list[int]:
    hvd.shutdown()
    hvd.init(Communicator())
    gathered: list[int] = hvd.allgather(torch.tensor([hvd.rank()])).tolist()
    return gathered


def test_init_takes_a_communicator(two: RankPool) -> None:
    assert run_horovod(two, _communicator) == [[0, 1], [0, 1]]
    with pytest.raises(ValueError, match="list of ranks, or a communicator"):
        hvd.init(comm="all")
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet("01")
