"""Runs a rank's stages by PyTorch's pipeline schedules with send buffers of fixed sizes, and records the order of what
ran."""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import CheckpointFunction

from meshwright.blocks.power_iteration import power_iterations, without_power_iteration
from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.parallel.pipeline.stage import Stage
from meshwright.parallel.pipeline.transport import BufferSpec
from meshwright.parallel.torch_private import backward_roots

Buffers = tuple[tuple[BufferSpec, ...], ...]  # of each cut, one per tensor that crosses it

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_ONE_STAGE_PER_RANK = ("gpipe", "1f1b")
# Before torch 2.13, a backward pass split into input and weight gradients counts a weight twice that is used twice.
_SPLIT_BACKWARD_MISCOUNTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class ExecutedAction(NamedTuple):
    """One pass of one microbatch through one stage. A backward pass is whole, or in two parts: the gradients of the
    inputs first, those of the weights later."""

    stage: int
    microbatch: int
    kind: Literal["forward", "backward", "input_backward", "weight_backward"]


class ScheduleRunner:
    """Runs the stages of this rank by one schedule. `buffers` has the shapes that are sent over each cut for every
    microbatch. Every action that runs is appended to `executed`. With `whole_backward`, no backward pass runs in two
    parts."""

    def __init__(
        self,
        stages: Sequence[Stage],
        buffers: Buffers,
        schedule: str,
        microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        executed: list[ExecutedAction],
        *,
        whole_backward: bool,
    ) -> None:
        self.buffers = buffers
        self._microbatches = microbatches
        self._stages = [_TorchStage(stage, buffers, device, group, executed, whole_backward) for stage in stages]
        torch_stages = self._stages[0] if schedule in _ONE_STAGE_PER_RANK else self._stages
        # The last stage returns the loss itself: models may return anything, PyTorch's stages may not.
        self._schedule = _SCHEDULES[schedule](
            torch_stages, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False
        )
        # Torch 2.15 has an argument for the round in which FSDP2 reduces gradients. Before, each stage decides it.
        self._schedule_defers_reduction = "finalize_gradients" in inspect.signature(self._schedule.step).parameters

    def run(self, *, is_first_round: bool, is_last_round: bool) -> None:
        """Runs the forward and backward passes of one accumulation round: of as many microbatches as the schedule runs
        at once. FSDP2 reduces gradients in the last round of a step only, and spectral norms are improved in the first
        microbatch of the first round only."""
        for torch_stage in self._stages:
            torch_stage.reduces_gradients = is_last_round
            torch_stage.iterates_power = is_first_round
            torch_stage.wrapped_stage.send_buffers = (
                self.buffers[torch_stage.stage_index] if not torch_stage.is_last else ()
            )
        # PyTorch requires targets. Ours are ignored: the last stage knows which microbatch its loss belongs to.
        began, computed = time.perf_counter(), sum(stage.computed_s for stage in self._stages)
        options = {"finalize_gradients": is_last_round} if self._schedule_defers_reduction else {}
        self._schedule.step(target=torch.arange(self._microbatches), return_outputs=False, **options)
        passed = time.perf_counter() - began
        # Between its passes a rank exchanges activations with its neighbours, or waits for them.
        WAIT_CLOCK.seconds += passed - (sum(stage.computed_s for stage in self._stages) - computed)


class _TorchStage(PipelineStage):
    """PyTorch's pipeline stage, which runs one of our `Stage`s. It tells the `Stage` which microbatch runs, and appends
    each action to `executed`."""

    def __init__(
        self,
        stage: Stage,
        buffers: Buffers,
        device: torch.device,
        group: dist.ProcessGroup,
        executed: list[ExecutedAction],
        whole_backward: bool,
    ) -> None:
        received = buffers[stage.index - 1] if stage.index else ()
        sent = buffers[stage.index] if stage.index < len(buffers) else (BufferSpec((), torch.float32),)
        runs_backward_whole = whole_backward or (stage.reuses_weights and _SPLIT_BACKWARD_MISCOUNTS)
        super().__init__(
            stage,
            stage.index,
            len(buffers) + 1,
            device,
            input_args=tuple(_meta_tensor(buffer) for buffer in received),
            output_args=tuple(_meta_tensor(buffer) for buffer in sent),
            group=group,
        )
        self._runs_backward_whole = runs_backward_whole
        self._whole: set[int] = set()  # the microbatches whose backward pass runs as a whole
        self.wrapped_stage = stage
        self.reduces_gradients = True
        self.iterates_power = True
        self._power_iterations = power_iterations(stage)
        self._executed = executed
        self.computed_s = 0.0  # of all passes so far

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._executed.append(ExecutedAction(self.stage_index, fwd_chunk_id, "forward"))
        self.wrapped_stage.microbatch = fwd_chunk_id
        is_first = self.iterates_power and fwd_chunk_id == 0
        with nullcontext() if is_first else without_power_iteration(self._power_iterations), self._computing():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        is_whole = kwargs.get("full_backward", True)
        kind: Literal["backward", "input_backward"] = "backward" if is_whole else "input_backward"
        self._executed.append(ExecutedAction(self.stage_index, bwd_chunk_id, kind))
        if not is_whole:
            self._unshard()
            if self._runs_backward_whole or has_custom_function(backward_roots(self, bwd_chunk_id)):
                self._whole.add(bwd_chunk_id)
        self.dw_builder = _no_weight_backward if bwd_chunk_id in self._whole else None
        with self._computing():
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._executed.append(ExecutedAction(self.stage_index, bwd_chunk_id, "weight_backward"))
        self._unshard()
        self.dw_builder = _no_weight_backward if bwd_chunk_id in self._whole else None
        self._whole.discard(bwd_chunk_id)
        with self._computing():
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Adds the time of a pass to `computed_s`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.computed_s += time.perf_counter() - began

    def _unshard(self) -> None:
        """A split backward pass looks up the weights that the forward pass used, which are the gathered ones."""
        for unit in self.wrapped_stage.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leaves out messages to this rank itself. Torch 2.11 greets every neighbouring stage, and in the middle of a
        V schedule that stage is on the same rank, which Gloo cannot send to. Torch 2.15 has no such method."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Does nothing. Torch 2.11 checks shape and type of outputs here; `Stage` checks those that are sent, and a
        loss may have any."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.reduces_gradients:
            super().perform_reduce_grad(grad_scale_factor)


def _no_weight_backward() -> Callable[[], None]:
    """As `dw_builder` this tells PyTorch's stage that nothing remains to be done for the weights, so it runs the whole
    backward pass where it would compute the gradients of the inputs only."""
    return lambda: None


def has_custom_function(outputs: Sequence[Tensor | GradientEdge | None]) -> bool:
    """Whether these outputs were computed with an autograd function of the user, or a checkpoint that calls backward by
    itself. What torch does for the gradients of the inputs alone is not known to be right for their backward passes."""
    starts = [
        output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs if output is not None
    ]
    nodes = [node for node in starts if node is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        function = getattr(type(node), "_forward_cls", None)
        is_known = function is None or function.__module__.partition(".")[0] in ("torch", "meshwright")
        if not is_known or function is CheckpointFunction:
            return True
        earlier = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= earlier
        nodes.extend(earlier)
    return False


def _meta_tensor(buffer: BufferSpec) -> Tensor:
    return torch.empty(buffer.shape, dtype=buffer.dtype, device="meta", requires_grad=True)
