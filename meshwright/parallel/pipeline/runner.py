"""PyTorch's pipeline schedules over our stages, for values of one size; and the order in which they ran."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from meshwright.parallel.pipeline.stages import Stage
from meshwright.parallel.pipeline.transport import Room

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_SINGLE = ("gpipe", "1f1b")
# Where a backward pass is split, torch 2.11 counts a weight twice that is used twice.
_SPLIT_MISCOUNTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class Executed(NamedTuple):
    stage: int
    microbatch: int
    kind: Literal["forward", "backward", "input_backward", "weight_backward"]


class Runner:
    """The stages of this rank and their schedule. `rooms` of each cut are what travels over it."""

    def __init__(
        self,
        stages: Sequence[Stage],
        rooms: tuple[tuple[Room, ...], ...],
        schedule: str,
        microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        executed: list[Executed],
        *,
        recomputes: bool,
    ) -> None:
        self.rooms = rooms
        self._microbatches = microbatches
        self._stages = [_TorchStage(stage, rooms, device, group, executed, recomputes) for stage in stages]
        held = self._stages[0] if schedule in _SINGLE else self._stages
        # The last stage returns the loss itself: models may return anything, PyTorch's stages may not.
        self._schedule = _SCHEDULES[schedule](held, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def run(self, last: bool) -> None:
        """One round of microbatches; sharded gradients are combined in the last one of a step."""
        for stage in self._stages:
            stage.combines = last
            stage.ours.rooms = self.rooms[stage.stage_index] if not stage.is_last else ()
        # Which microbatch a loss belongs to, the stage knows itself.
        self._schedule.step(target=torch.arange(self._microbatches), return_outputs=False)


class _TorchStage(PipelineStage):
    """PyTorch's stage, told which microbatch runs, and noting what runs."""

    def __init__(
        self,
        stage: Stage,
        rooms: tuple[tuple[Room, ...], ...],
        device: torch.device,
        group: dist.ProcessGroup,
        executed: list[Executed],
        recomputes: bool,
    ) -> None:
        received = rooms[stage.index - 1] if stage.index else ()
        sent = rooms[stage.index] if stage.index < len(rooms) else (Room((), torch.float32),)
        super().__init__(
            stage,
            stage.index,
            len(rooms) + 1,
            device,
            input_args=tuple(_example(room) for room in received),
            output_args=tuple(_example(room) for room in sent),
            group=group,
            # A backward pass in two parts would compute its blocks again twice.
            dw_builder=_all_at_once if recomputes or (stage.reuses and _SPLIT_MISCOUNTS) else None,
        )
        self.ours = stage
        self.combines = True
        self._executed = executed

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._executed.append(Executed(self.stage_index, fwd_chunk_id, "forward"))
        self.ours.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        whole = kwargs.get("full_backward", True)
        self._executed.append(Executed(self.stage_index, bwd_chunk_id, "backward" if whole else "input_backward"))
        if not whole:
            self._gather()
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._executed.append(Executed(self.stage_index, bwd_chunk_id, "weight_backward"))
        self._gather()
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _gather(self) -> None:
        """A backward pass in parts looks for the weights that the forward pass used: sharded ones are others."""
        for unit in self.ours.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets every neighbour, which in the middle of a V is this rank itself: Gloo cannot."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Torch 2.11 checks shape and type: of what is sent we do, and of a loss they may be any."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.combines:
            super().perform_reduce_grad(grad_scale_factor)


def _all_at_once() -> Callable[[], None]:
    """Nothing is left to do for the weights: with this, PyTorch's stages run the backward pass of the inputs whole."""
    return lambda: None


def _example(room: Room) -> Tensor:
    return torch.empty(room.shape, dtype=room.dtype, device="meta", requires_grad=True)
