"""The replicate axis: every rank holds the whole model, and DDP averages gradients during the backward pass."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.native import NativeReducer
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.small_sums import SharedMemorySums, SmallSums
from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.errors import InputError
from meshwright.parallel.mesh import DATA_AXES, has_axis
from meshwright.parallel.precision import gradient_reduce_dtype
from meshwright.parallel.replicate.batch_norm import hide_sync_batch_norm
from meshwright.parallel.replicate.bucket_names import describe_bucket
from meshwright.parallel.replicate.process_group import GroupWithSharedSums
from meshwright.parallel.torch_private import (
    broadcast_coalesced,
    comm_hook_states,
    count_waits,
    ignore_in_ddp,
    silence_unused_parameters_warning,
)
from meshwright.plan import Plan
from meshwright.plan_fields.groups import MIB


def replicate(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    reducer: Reducer,
    ignored: Collection[str] = (),
    sums: SmallSums | None = None,
) -> DistributedDataParallel:
    """The module in DDP over the `replicate` axis of the mesh. Parameters named in `ignored` are neither averaged nor
    broadcast. `sums` adds small tensors through shared memory where ranks have it.

    `find_unused_parameters` is set for two reasons: users need not say which parameters some step does not use, and DDP
    keeps its first bucket layout. Without it DDP rebuilds its buckets after the first step, and a resumed run would sum
    in another order than an undisturbed one.
    """
    if ignored:
        names = [
            *ignored,
            *(f".{name}" for name in ignored if "." not in name),
        ]  # so DDP names those of the root module
        ignore_in_ddp(module, names)
    group = mesh.get_group("replicate")
    silence_unused_parameters_warning()
    with hide_sync_batch_norm(module):
        model = DistributedDataParallel(
            module,
            process_group=GroupWithSharedSums(group, sums) if isinstance(sums, SharedMemorySums) else group,
            bucket_cap_mb=plan.gradients.bucket_bytes / MIB,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )
    count_waits(model, WAIT_CLOCK.counted)
    if plan.gradients.local_steps == 1:  # otherwise LocalSteps registers its hook
        _register_hook(model, group, plan, reducer)
    return model


def _register_hook(model: DistributedDataParallel, group: dist.ProcessGroup, plan: Plan, reducer: Reducer) -> None:
    gradients, reduce_dtype = plan.gradients, gradient_reduce_dtype(plan)
    if gradients.powersgd_rank:
        if next(model.parameters()).device.type == "cpu" and torch.cuda.is_available():
            raise InputError(
                "PyTorch's PowerSGD waits for a GPU wherever there is one, and these ranks have none: start them with"
                " CUDA_VISIBLE_DEVICES= (empty), or set gradients.powersgd_rank to 0"
            )
        state = power_sgd.PowerSGDState(group, gradients.powersgd_rank, start_powerSGD_iter=POWER_SGD_AFTER)
        model.register_comm_hook(state, power_sgd.powerSGD_hook if _is_nccl(group) else _power_sgd_one_at_a_time)
    elif reduce_dtype is not None or not isinstance(reducer, NativeReducer):
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        model.register_comm_hook(None, ReducerHook(reducer, reduce_dtype, group, names).run)
        weakref.finalize(model, reducer.close)


POWER_SGD_AFTER = 2  # steps without compression: the fewest that PowerSGD's error feedback allows


def _power_sgd_one_at_a_time(
    state: power_sgd.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD for one bucket after the other. The hook waits for collectives inside of Gloo's two threads, where two
    buckets at once would wait for each other."""
    future = power_sgd.powerSGD_hook(state, bucket)
    future.wait()
    return future


def forget_compressed_gradients(model: DistributedDataParallel) -> None:
    """Drops the errors and the factors that PowerSGD keeps from step to step. Does nothing for other plans."""
    for state in comm_hook_states(model):
        if isinstance(state, power_sgd.PowerSGDState):
            state.error_dict.clear()
            state.p_memory_dict.clear()
            state.q_memory_dict.clear()


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "nccl"


class ReducerHook:
    """A DDP communication hook that averages buckets with a `Reducer`. Each bucket is started when it is ready, in
    DDP's order; the call for the last bucket waits for all of them. Gradients are sent as `reduce_dtype`, or in their
    own dtype if that is None. `names` are those of the parameters by their ids, for messages."""

    def __init__(
        self,
        reducer: Reducer,
        reduce_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._reducer = reducer
        self._group = group
        self._reduce_dtype = reduce_dtype
        self._send_buffers: dict[int, Tensor] = {}  # by bucket, where `reduce_dtype` is not None
        self._names = names
        self._bucket_names: dict[int, list[str]] = {}
        self._started: list[tuple[torch.futures.Future[Tensor], Tensor, Tensor]] = []

    def run(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients, number = bucket.buffer(), bucket.index()
        if number not in self._bucket_names:
            in_bucket = {id(parameter) for parameter in bucket.parameters()}
            self._bucket_names[number] = [name for key, name in self._names.items() if key in in_bucket]
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if gradients.layout != torch.strided:
            future.set_result(self._sparse_mean(gradients))
            if bucket.is_last():
                self._finish()
            return future
        send_buffer = self._send_buffer(gradients, number)
        self._reducer.start(send_buffer, number)
        self._started.append((future, gradients, send_buffer))
        if bucket.is_last():
            self._finish()
        return future

    def _send_buffer(self, gradients: Tensor, number: int) -> Tensor:
        """The bucket itself, or its gradients rounded to `reduce_dtype`."""
        if self._reduce_dtype is None:
            return gradients
        buffer = self._send_buffers.get(number)
        if buffer is None or buffer.shape != gradients.shape:
            buffer = self._send_buffers[number] = torch.empty_like(gradients, dtype=self._reduce_dtype)
        return buffer.copy_(gradients)

    def _sparse_mean(self, gradient: Tensor) -> Tensor:
        """The mean of sparse gradients, of which every rank has other rows: the backend sums them in their own type."""
        total = gradient.coalesce()
        dist.all_reduce(total, group=self._group)
        return total / dist.get_world_size(self._group)

    def _finish(self) -> None:
        started, self._started = self._started, []
        with WAIT_CLOCK.blocked(self._awaited):
            self._reducer.finish()
        for future, gradients, send_buffer in started:
            future.set_result(gradients if send_buffer is gradients else gradients.copy_(send_buffer))

    def _awaited(self) -> str:
        """The exchange that this rank waits for, in words."""
        number = self._reducer.awaited
        return describe_bucket(number, self._bucket_names.get(number, ()) if number is not None else ())


def broadcast_buffers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all data ranks the buffers of the first one, as DDP does before each forward pass in training. Evaluation
    and checkpoints then have the same buffers as the next training step."""
    axes = (axis for axis in (*DATA_AXES, "context") if has_axis(mesh, axis))
    broadcast_buffers_over(module, [mesh.get_group(axis) for axis in axes])


def broadcast_buffers_over(module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Overwrites the buffers by those of each group's first rank, one group after the other."""
    buffers = [buffer.detach() for buffer in module.buffers()]
    if buffers:
        for group in groups:
            broadcast_coalesced(group, buffers, 25 * MIB)
