"""The replicate axis: every rank holds the whole model, and gradients are averaged while backward runs."""

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.native import Native
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.sums import SharedSums, Sums
from meshwright.errors import InputError
from meshwright.parallel.precision import travelling_dtype
from meshwright.parallel.replicate.process_group import Beside
from meshwright.plan import MIB, Plan

DATA_AXES = ("replicate", "shard")


def replicate(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    reducer: Reducer,
    ignored: Collection[str] = (),
    sums: Sums | None = None,
) -> DistributedDataParallel:
    """DDP over the `replicate` axis of the mesh; parameters called `ignored` are neither averaged nor made equal.

    `find_unused_parameters` does two things for us: a parameter that some step does not use needs no word
    from the user, and DDP keeps its first bucket layout. Otherwise it rebuilds its buckets after the first
    step, and a resumed run would sum in another order than the undisturbed one.
    """
    if ignored:
        names = [*ignored, *(f".{name}" for name in ignored if "." not in name)]  # DDP's own name of the root's
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    group = mesh.get_group("replicate")
    model = DistributedDataParallel(
        module,
        process_group=Beside(group, sums) if isinstance(sums, SharedSums) else group,
        bucket_cap_mb=plan.gradients.bucket_bytes / MIB,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
    if plan.gradients.local_steps == 1:  # otherwise LocalSteps says when they travel
        _register(model, group, plan, reducer)
    return model


def _register(model: DistributedDataParallel, group: dist.ProcessGroup, plan: Plan, reducer: Reducer) -> None:
    gradients, travelling = plan.gradients, travelling_dtype(plan)
    if gradients.powersgd_rank:
        if next(model.parameters()).device.type == "cpu" and torch.cuda.is_available():
            raise InputError(
                "PyTorch's PowerSGD waits for a GPU wherever there is one, and these ranks have none: start them with"
                " CUDA_VISIBLE_DEVICES= (empty), or set gradients.powersgd_rank to 0"
            )
        shorter = power_sgd.PowerSGDState(group, gradients.powersgd_rank, start_powerSGD_iter=POWER_SGD_AFTER)
        model.register_comm_hook(shorter, power_sgd.powerSGD_hook if _is_nccl(group) else _power_sgd_in_turn)
    elif travelling is not None or not isinstance(reducer, Native):
        model.register_comm_hook(None, Hook(reducer, travelling, group).run)
        weakref.finalize(model, reducer.close)


POWER_SGD_AFTER = 2  # steps: the fewest that its feedback of errors allows


def _power_sgd_in_turn(state: power_sgd.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Bucket after bucket: the hook waits for collectives in Gloo's own two threads, where two buckets at once would
    wait for each other."""
    future = power_sgd.powerSGD_hook(state, bucket)
    future.wait()
    return future


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "nccl"


class Hook:
    """A reducer as DDP's communication hook: buckets are started as they are ready, in DDP's order, and the last one
    waits for all. Gradients travel in the type `travelling`, where it is not None."""

    def __init__(
        self, reducer: Reducer, travelling: torch.dtype | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._reducer = reducer
        self._group = group
        self._travelling = travelling
        self._rounded: dict[int, Tensor] = {}
        self._flying: list[tuple[torch.futures.Future[Tensor], Tensor, Tensor]] = []

    def run(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat, number = bucket.buffer(), bucket.index()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if flat.layout != torch.strided:
            future.set_result(self._sparse_mean(flat))
            if bucket.is_last():
                self._finish()
            return future
        sent = self._sent(flat, number)
        self._reducer.start(sent, number)
        self._flying.append((future, flat, sent))
        if bucket.is_last():
            self._finish()
        return future

    def _sent(self, flat: Tensor, number: int) -> Tensor:
        """The bucket itself, or its numbers rounded."""
        if self._travelling is None:
            return flat
        known = self._rounded.get(number)
        if known is None or known.shape != flat.shape:
            known = self._rounded[number] = torch.empty_like(flat, dtype=self._travelling)
        return known.copy_(flat)

    def _sparse_mean(self, gradient: Tensor) -> Tensor:
        """Rows that each rank has of its own: the backend brings them together, in the parameters' own type."""
        total = gradient.coalesce()
        dist.all_reduce(total, group=self._group)
        return total / dist.get_world_size(self._group)

    def _finish(self) -> None:
        flying, self._flying = self._flying, []
        self._reducer.finish()
        for future, flat, sent in flying:
            future.set_result(flat if sent is flat else flat.copy_(sent))


def align_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all data ranks the buffers of the first one, as DDP does before each forward pass of training: what
    evaluation uses and a checkpoint holds is then what training goes on with."""
    align_over(module, [mesh.get_group(axis) for axis in DATA_AXES if axis in (mesh.mesh_dim_names or ())])


def align_over(module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """From the first rank of each group to its others, one group after the other: all have the first rank's."""
    buffers = [buffer.detach() for buffer in module.buffers()]
    if buffers:
        for group in groups:
            dist._broadcast_coalesced(group, buffers, 25 * MIB, 0)
