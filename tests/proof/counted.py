"""What a rank exchanges while it trains, counted: every collective with its axis and bytes, and the bytes it holds.

`counting` watches torch's own operators for collectives (`c10d`), which all of them go through, also those that DDP
starts from C++ and FSDP2 from its hooks. The bytes are those that a prediction states (tests/simulator/traffic.py):

    all_reduce, broadcast   the tensor             all_to_all       what this rank has of it
    all_gather              the gathered tensor    point_to_point   what this rank sends; not what it receives
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
from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.threaded import Threaded
from meshwright.errors import MeshwrightError
from meshwright.parallel.weights.layout import local_of

# Sums of losses, counts and norms, which are one to three numbers; flags of a few tied weights.
FEW = 4


@dataclass(frozen=True)
class Counted:
    """One kind of exchange: `count` collectives of so many `bytes` each. `axis` is `data` where ranks of the replicate
    and of the shard axis take part, null where those of other axes do. `says`: whole numbers (sizes, flags), or at
    most `FEW` of any kind, which no prediction states."""

    axis: str | None
    collective: Collective
    bytes: int
    says: bool
    count: int = 1


def total(found: tuple[Counted, ...]) -> dict[tuple[str | None, str], int]:
    """Bytes by axis and collective, without what is only said."""
    sums: Counter[tuple[str | None, str]] = Counter()
    for exchange in found:
        if not exchange.says:
            sums[exchange.axis, exchange.collective] += exchange.bytes * exchange.count
    return dict(sums)


class Count:
    """What has been counted so far."""

    def __init__(self) -> None:
        self._found: Counter[tuple[str | None, Collective, int, bool]] = Counter()

    def add(self, axis: str | None, collective: Collective, tensors: list[Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        numbers = sum(tensor.numel() for tensor in tensors)
        floats = all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        # Buffers of all kinds travel together.
        says = collective != "broadcast" and (numbers <= FEW or not floats)
        self._found[axis, collective, size, says] += 1

    @property
    def exchanges(self) -> tuple[Counted, ...]:
        ordered = sorted(self._found.items(), key=lambda item: str(item[0]))
        return tuple(Counted(*kind, count) for kind, count in ordered)


@contextmanager
def counting(mesh: DeviceMesh | None) -> Iterator[Count]:
    """Counts what this rank exchanges inside of the block."""
    count = Count()
    with _Watch(mesh, count), _reducers_watched(mesh, count):
        yield count


@contextmanager
def _reducers_watched(mesh: DeviceMesh | None, count: Count) -> Iterator[None]:
    """Those that use no collective of torch's, or do so in threads that a mode does not see."""
    before = {kind: kind.start for kind in (SharedMemory, Threaded)}

    def counted(self: Any, flat: Tensor, bucket: int) -> None:
        count.add(_axis_of(mesh, self.ranks), "all_reduce", [flat])
        kind = SharedMemory if isinstance(self, SharedMemory) else Threaded
        before[kind](self, flat, bucket)

    for kind in before:
        setattr(kind, "start", counted)  # noqa: B010 - what mypy is told not to look at
    try:
        yield
    finally:
        for kind, start in before.items():
            setattr(kind, "start", start)  # noqa: B010


def held_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What this rank holds behind a step: its own parts of weights, gradients and optimizer state, under the names of
    a `MemoryPrediction`. Counters of the optimizer are left out."""
    weights = list(module.parameters())
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor) and v.dim()]
    return {
        "weights": _bytes(weights),
        "gradients": _bytes([weight.grad for weight in weights if weight.grad is not None]),
        "optimizer state": _bytes(state),
    }


def _bytes(tensors: list[Any]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_of, tensors))


class _Watch(TorchDispatchMode):
    def __init__(self, mesh: DeviceMesh | None, count: Count) -> None:
        super().__init__()
        self._count = count
        self._mesh = mesh

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.partition("::")[2]
        if name in _SILENT:
            return
        if name not in _MOVES:
            raise MeshwrightError(f"the collective {func} is not one whose bytes are counted")
        collective, moved = _MOVES[name]
        self._count.add(self._axis(args), collective, [t for t in tree_leaves(moved(args)) if isinstance(t, Tensor)])

    def _axis(self, args: tuple[Any, ...]) -> str | None:
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # the process group comes first
        return _axis_of(self._mesh, dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))


def _axis_of(mesh: DeviceMesh | None, ranks: list[int]) -> str | None:
    """The one along which ranks lie, which are all or some of it."""
    if mesh is None:
        return None
    places = torch.stack([(mesh.mesh == rank).nonzero()[0] for rank in ranks])
    apart = (places != places[0]).any(0).tolist()
    along = [axis for axis, differs in zip(mesh.mesh_dim_names or (), apart, strict=True) if differs]
    if along == ["replicate", "shard"]:
        return "data"
    return along[0] if len(along) == 1 else None


def _first(args: tuple[Any, ...]) -> Any:
    return args[0]


def _second(args: tuple[Any, ...]) -> Any:
    return args[1]


_MOVES: dict[str, tuple[Collective, Callable[[tuple[Any, ...]], Any]]] = {
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
_SILENT = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor")
