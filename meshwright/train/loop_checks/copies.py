"""`WeightCopies`: compares the copies of weights that several ranks hold, and what is set on them (settings.py). They
are equal under every plan; if they are not, the user's loop or a callback has changed them on some ranks only.

    checksum of a weight w = (Σ w, ‖w‖²), in fp64                                                         _checksums
    number of settings       = 48 bits of a digest of them, which a float holds exactly              Settings.number
    copies differ if |Σ w - Σ w'| / (√n ‖w‖) or |‖w‖² - ‖w'‖²| / ‖w‖² is above TOLERANCE                _differences

Copies are compared after steps 1, 2, 4, ..., 128, then after every 128th, and before weights are saved: each time reads
all weights once, which takes less than a step's optimizer does. On a GPU the host reads the result one step later, when
it is there already.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError
from meshwright.parallel.mesh import has_axis
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.weights.layout import local_tensor
from meshwright.train.loop_checks.settings import Settings

EVERY_STEPS = 128
TOLERANCE = 1e-5  # far above what rounding changes, and far below what trains another model


@dataclass(frozen=True)
class _Copies:
    """The weights of which the ranks of a group hold copies, and the global numbers of these ranks. There are no
    weights if the ranks only have the same settings."""

    group: dist.ProcessGroup
    names: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Pending:
    """Checksums and numbers of settings of all ranks of a group, on their way to the host. `ready` is None if they are
    there."""

    copies: _Copies
    step: int
    settings: Settings
    checksums: Tensor
    ready: "torch.cuda.Event | None"


class WeightCopies:
    """Compares the copies of one session's weights. All ranks call its methods together."""

    def __init__(self, parallel: ParallelModel, read_settings: Callable[[], Settings]) -> None:
        self._parallel = parallel
        self._read_settings = read_settings
        self._groups = list(_groups_with_copies(parallel))
        self._pending: list[_Pending] = []

    def after_step(self, steps: int) -> None:
        """Called after each step, with the number of steps so far. Raises an `InputError` on all ranks if a copy
        differs."""
        if not self._groups:
            return
        self._read_pending()
        if steps % EVERY_STEPS == 0 or (steps < EVERY_STEPS and steps & (steps - 1) == 0):
            self._start(steps)
            if self._parallel.device.type != "cuda":
                self._read_pending()

    def compare_now(self, steps: int) -> None:
        """Compares the copies now. Raises an `InputError` on all ranks if one differs."""
        if self._groups:
            self._start(steps)
            self._read_pending()

    @torch.no_grad()
    def _start(self, steps: int) -> None:
        parameters, settings = self._parallel.parameters(), self._read_settings()
        for copies in self._groups:
            weights = [local_tensor(parameters[name]) for name in copies.names]
            number = torch.full((1, 2), settings.number, dtype=torch.float64)
            local = torch.cat([tensor.to(self._parallel.device) for tensor in (*_checksums(weights), number)])
            of_ranks = [torch.empty_like(local) for _ in copies.ranks]
            dist.all_gather(of_ranks, local, group=copies.group)
            checksums, ready = torch.stack(of_ranks), None
            if checksums.is_cuda:
                on_host = torch.empty_like(checksums, device="cpu", pin_memory=True)
                checksums, ready = on_host.copy_(checksums, non_blocking=True), torch.cuda.Event()
                ready.record()
            self._pending.append(_Pending(copies, steps, settings, checksums, ready))

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, []
        parameters = self._parallel.parameters() if pending else {}
        for entry in pending:
            if entry.ready is not None:
                entry.ready.synchronize()
            if (entry.checksums[:, -1] != entry.checksums[0, -1]).any():
                entry.settings.compare(entry.copies.group, entry.copies.ranks, entry.step)
            sizes = torch.tensor([local_tensor(parameters[name]).numel() for name in entry.copies.names])
            for position, checksums in enumerate(entry.checksums[1:, :-1], 1):
                differences = _differences(entry.checksums[0, :-1], checksums, sizes.double())
                if (differences > TOLERANCE).any():
                    name, more = entry.copies.names[int(differences.argmax())], int((differences > TOLERANCE).sum()) - 1
                    first, other = entry.copies.ranks[0], entry.copies.ranks[position]
                    raise InputError(_describe(name, more, first, other, entry.step))


def _describe(name: str, more: int, first: int, other: int, step: int) -> str:
    others = f" and {more} other weight{'s' if more > 1 else ''}" if more else ""
    return (
        f"{name}{others} of rank {other} differ from those of rank {first}, at step {step}: the loop or a callback has"
        " changed weights or settings of the optimizer on some ranks only, and the ranks train different models: make"
        " the same change on all ranks, also where only one of them logs or saves"
    )


def _groups_with_copies(parallel: ParallelModel) -> Iterator[_Copies]:
    """Yields the groups of ranks of which this rank is one that hold the same weights: those of the replicate and
    context axes, and for weights that are not split, of the tensor axis; and that of the shard axis, whose ranks have
    the same settings. None with local steps, whose weights differ
    between averages, nor for experts and branches, which lie on different ranks."""
    plan, mesh = parallel.plan, parallel.mesh
    if mesh is None or plan.gradients.local_steps > 1 or plan.axes.expert > 1:
        return
    local_names = {tie.name: tie.local_name for tie in parallel.tied}
    divided = defaultdict[str, set[str]](set)
    for name, layout in parallel.layouts.items():
        divided[layout.axis].add(name)
    for axis in ("replicate", "shard", "context", "tensor"):
        if not has_axis(mesh, axis):
            continue
        names = (
            ()
            if axis == "shard"
            else tuple(
                name
                for name, weight in parallel.parameters().items()
                if local_names.get(name, name) not in divided[axis]
                and not (axis == "context" and isinstance(weight, DTensor))  # sharded over this axis, too
                and weight.is_floating_point()
            )
        )
        group = mesh.get_group(axis)
        yield _Copies(group, names, tuple(dist.get_process_group_ranks(group)))


def _checksums(weights: list[Tensor]) -> Iterator[Tensor]:
    """Yields (Σ w, ‖w‖²) of all weights, if there are any."""
    if not weights:
        return
    sums = torch.stack([weight.sum(dtype=torch.float64) for weight in weights])
    norms = torch.stack([torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights])
    yield torch.stack([sums, norms.square()], 1)


def _differences(first: Tensor, other: Tensor, sizes: Tensor) -> Tensor:
    """Returns how far two ranks' checksums of each weight are apart, in relation to the weight. 0 for weights that are
    NaN or infinite on both ranks, and infinity for those that are on one of them."""
    square = torch.maximum(first[:, 1], other[:, 1])
    scales = torch.stack([(sizes * square).sqrt(), square], 1)
    apart = (first - other).abs() / scales.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(first.isfinite() | other.isfinite(), apart.nan_to_num(nan=math.inf), 0.0).amax(1)
