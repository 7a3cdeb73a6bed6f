"""Counts the collectives of a rank while it trains, with axis and bytes, and the bytes that it holds.

`count_traffic` intercepts torch's operators for collectives (`c10d`), which all of them go through, also those that DDP
starts from C++ and FSDP2 from its hooks. The bytes are those that a prediction states (tests/simulator/traffic.py):

    all_reduce, broadcast   the tensor             all_to_all       this rank's part of the tensor
    all_gather              the gathered tensor    point_to_point   what this rank sends, not what it receives
    reduce_scatter          the tensor before
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.cluster.cluster import Collective
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.threaded import ThreadedReducer
from meshwright.errors import MeshwrightError
from meshwright.parallel.weights.layout import local_tensor

# The most numbers that a collective for control has: sums of losses, counts and norms, and flags of a few tied weights.
MOST_CONTROL_NUMBERS = 4


@dataclass(frozen=True)
class CountedCollective:
    """`count` collectives of `bytes` bytes each. `axis` is `data` if ranks of several of the axes replicate, shard,
    expert and context take part, and None if those of several other axes do. `is_control` marks integers (sizes,
    flags), and at most `MOST_CONTROL_NUMBERS` numbers of any kind, which no prediction states."""

    axis: str | None
    collective: Collective
    bytes: int
    is_control: bool
    count: int = 1


def bytes_by_collective(collectives: tuple[CountedCollective, ...]) -> dict[tuple[str | None, str], int]:
    """Bytes by axis and collective, without those for control."""
    sums: Counter[tuple[str | None, str]] = Counter()
    for counted in collectives:
        if not counted.is_control:
            sums[counted.axis, counted.collective] += counted.bytes * counted.count
    return dict(sums)


class TrafficCounter:
    """The collectives counted so far."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str | None, Collective, int, bool]] = Counter()

    def add(self, axis: str | None, collective: Collective, tensors: list[Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        numbers = sum(tensor.numel() for tensor in tensors)
        floats = all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        # Buffers of all types are broadcast together.
        is_control = collective != "broadcast" and (numbers <= MOST_CONTROL_NUMBERS or not floats)
        self._counts[axis, collective, size, is_control] += 1

    @property
    def collectives(self) -> tuple[CountedCollective, ...]:
        ordered = sorted(self._counts.items(), key=lambda item: str(item[0]))
        return tuple(CountedCollective(*kind, count) for kind, count in ordered)


@contextmanager
def count_traffic(mesh: DeviceMesh | None) -> Iterator[TrafficCounter]:
    """Within this context, counts the collectives of this rank."""
    counter = TrafficCounter()
    with _CollectiveObserver(mesh, counter), _observe_reducers(mesh, counter):
        yield counter


@contextmanager
def _observe_reducers(mesh: DeviceMesh | None, counter: TrafficCounter) -> Iterator[None]:
    """Counts reducers that use no collective of torch, or use one in a thread where a dispatch mode does not see it."""
    original = {kind: kind.start for kind in (SharedMemoryReducer, ThreadedReducer)}

    def start_counted(self: Any, flat: Tensor, bucket: int) -> None:
        counter.add(_axis_of(mesh, self.ranks), "all_reduce", [flat])
        kind = SharedMemoryReducer if isinstance(self, SharedMemoryReducer) else ThreadedReducer
        original[kind](self, flat, bucket)

    for kind in original:
        setattr(kind, "start", start_counted)  # noqa: B010 - mypy refuses to assign to a method
    try:
        yield
    finally:
        for kind, start in original.items():
            setattr(kind, "start", start)  # noqa: B010


def local_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes that this rank holds after a step: its parts of weights, gradients and optimizer state, under the names
    of a `MemoryPrediction`. Step counters of the optimizer are left out."""
    weights = list(module.parameters())
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor) and v.dim()]
    return {
        "weights": _bytes(weights),
        "gradients": _bytes([weight.grad for weight in weights if weight.grad is not None]),
        "optimizer state": _bytes(state),
    }


def _bytes(tensors: list[Any]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_tensor, tensors))


class _CollectiveObserver(TorchDispatchMode):
    def __init__(self, mesh: DeviceMesh | None, counter: TrafficCounter) -> None:
        super().__init__()
        self._counter = counter
        self._mesh = mesh

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.partition("::")[2]
        if name in _UNCOUNTED:
            return
        if name not in _COUNTED:
            raise MeshwrightError(f"the collective {func} has no rule for counting its bytes")
        collective, counted_argument = _COUNTED[name]
        tensors = [leaf for leaf in tree_leaves(counted_argument(args)) if isinstance(leaf, Tensor)]
        self._counter.add(self._axis(args), collective, tensors)

    def _axis(self, args: tuple[Any, ...]) -> str | None:
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # the process group comes first
        return _axis_of(self._mesh, dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))


def _axis_of(mesh: DeviceMesh | None, ranks: list[int]) -> str | None:
    """The axis along which the coordinates of these ranks differ."""
    if mesh is None:
        return None
    coordinates = torch.stack([(mesh.mesh == rank).nonzero()[0] for rank in ranks])
    differing = (coordinates != coordinates[0]).any(0).tolist()
    axes = [axis for axis, differs in zip(mesh.mesh_dim_names or (), differing, strict=True) if differs]
    if len(axes) > 1 and set(axes) <= {"replicate", "shard", "expert", "context"}:
        return "data"
    return axes[0] if len(axes) == 1 else None


def _first(args: tuple[Any, ...]) -> Any:
    return args[0]


def _second(args: tuple[Any, ...]) -> Any:
    return args[1]


_COUNTED: dict[str, tuple[Collective, Callable[[tuple[Any, ...]], Any]]] = {
    "allreduce_": ("all_reduce", _first),
    "allreduce_coalesced_": ("all_reduce", _first),
    "allgather_": ("all_gather", _first),
    "_allgather_base_": ("all_gather", _first),
    "allgather_into_tensor_coalesced_": ("all_gather", _first),
    "reduce_scatter_": ("reduce_scatter", _second),
    "_reduce_scatter_base_": ("reduce_scatter", _second),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _second),
    "alltoall_": ("all_to_all", _second),
    "alltoall_base_": ("all_to_all", _second),
    "broadcast_": ("broadcast", _first),
    "send": ("point_to_point", _first),
}
_UNCOUNTED = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor")
