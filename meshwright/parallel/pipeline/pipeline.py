"""The pipeline axis: sends microbatches through the stages of a model by PyTorch's schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.model_io.batch import ModelBatch, at_least_fp32
from meshwright.parallel.context.divide_model import SequenceDivision
from meshwright.parallel.pipeline.runner import Buffers, ExecutedAction, ScheduleRunner
from meshwright.parallel.pipeline.shape_inference import ShapeInference
from meshwright.parallel.pipeline.stage import Stage
from meshwright.parallel.pipeline.stages import LocalStages, install_transfers, pipeline_ranks_of_stages
from meshwright.parallel.pipeline.tied_gradients import TiedGradients
from meshwright.parallel.pipeline.transport import ActivationSpec, BufferSpec, buffer_spec_for
from meshwright.parallel.precision import forward_precision
from meshwright.parallel.torch_private import is_view
from meshwright.plan import Plan


class PipelineExecutor:
    """Runs this rank's stages. All ranks build it at the same time, when parameters and hooks of the stages are in
    place. `executed` lists, in order, the actions of the last `run`."""

    def __init__(
        self,
        local_stages: LocalStages,
        plan: Plan,
        mesh: DeviceMesh,
        device: torch.device,
        division: SequenceDivision | None = None,
    ) -> None:
        """`division`: how ranks of the context axis divide sequences; None without that axis."""
        self.local_stages = local_stages
        self.executed: list[ExecutedAction] = []
        self._plan = plan
        self._device = device
        self._group = mesh.get_group("pipeline")
        self._rank_of_stage = pipeline_ranks_of_stages(plan)
        self._tied_gradients = TiedGradients(local_stages, mesh)
        self._shape_inference = ShapeInference(local_stages.meta_model, local_stages.dataflow, device, division)
        self._runner: ScheduleRunner | None = None
        install_transfers(local_stages, self._shape_inference)
        for stage in local_stages.stages:
            stage.shape_inference = self._shape_inference
            stage.precision = self._precision

    def run(self, examples: Sequence[tuple[ModelBatch, int]], loss_of: Callable[[int, Any], Tensor]) -> None:
        """Runs forward and backward of all microbatches of a step, one accumulation round after another. On the rank
        of the last stage `loss_of` is called with a microbatch's index in `examples` and the model's output."""
        self.executed.clear()
        rounds, round_size = self._plan.memory.accumulation, self._plan.pipeline.microbatches
        assert len(examples) == rounds * round_size, f"{len(examples)} microbatches for {rounds} rounds of {round_size}"
        microbatches = [example for example, _ in examples]
        borrowed = [not samples for _, samples in examples]
        runner = self._runner_for(microbatches)
        for number in range(rounds):
            first = number * round_size

            def finish(microbatch: int, output: Any, first: int = first) -> Tensor:
                loss = loss_of(first + microbatch, at_least_fp32(output))
                # PyTorch's stages detach it in place, which a view does not allow.
                return loss.clone() if is_view(loss) or loss.is_leaf else loss

            with self._examples_set(
                microbatches[first : first + round_size], finish, borrowed[first : first + round_size]
            ):
                runner.run(is_first_round=number == 0, is_last_round=number == rounds - 1)
        self.finish()

    def finish(self) -> None:
        """Sums the gradients of tied parameters over the ranks that hold them."""
        self._tied_gradients.combine()

    def train(self, mode: bool = True) -> None:
        """Sets the training mode of the rank's module, which its stages follow."""
        self.local_stages.module.train(mode)

    @torch.no_grad()
    def evaluate(self, example: ModelBatch) -> Any | None:
        """Runs a forward pass in the module's current mode. Returns the model's output on the rank of the last stage
        and None on the others."""
        output = None
        with self._examples_set([example], lambda _, result: at_least_fp32(result)):
            activations = self._activations(example)
            from_previous_stage: tuple[Tensor, ...] = ()
            for stage in self.local_stages.stages:
                is_local = self._is_local(stage.index - 1)
                received = from_previous_stage if is_local else self._receive(stage, activations)
                result = stage(*received)
                if stage.is_last:
                    output = result
                elif self._is_local(stage.index + 1):
                    from_previous_stage = result
                else:
                    for buffer in result:
                        dist.send(buffer, group=self._group, group_dst=self._rank_of_stage[stage.index + 1])
        return output

    def _receive(self, stage: Stage, activations: dict[int, ActivationSpec]) -> tuple[Tensor, ...]:
        buffers = []
        for tensor in stage.received:
            spec = activations[tensor.value_id]
            buffer = torch.empty(spec.memory_shape, dtype=spec.transfer_dtype, device=self._device)
            dist.recv(buffer, group=self._group, group_src=self._rank_of_stage[stage.index - 1])
            buffers.append(buffer)
        return tuple(buffers)

    def _is_local(self, stage: int) -> bool:
        """Whether there is such a stage and it is on this rank."""
        return 0 <= stage < len(self._rank_of_stage) and self._rank_of_stage[stage] == self.local_stages.pipeline_rank

    def _precision(self) -> Any:
        return forward_precision(self._plan, self._device.type)

    def _activations(self, example: ModelBatch) -> dict[int, ActivationSpec]:
        return self._shape_inference.infer(example, self.local_stages.module.training, self._precision).activations

    @contextmanager
    def _examples_set(
        self, examples: list[ModelBatch], finish: Callable[[int, Any], Any], borrowed: Sequence[bool] = ()
    ) -> Iterator[None]:
        """Gives the stages the examples of one round, and takes them back. `borrowed` says for each of them whether its
        samples have no weight; empty if all have one."""
        for stage in self.local_stages.stages:
            stage.borrowed = borrowed
            stage.examples, stage.finish, stage.microbatch, stage.send_buffers = examples, finish, 0, ()
        try:
            yield
        finally:
            for stage in self.local_stages.stages:
                stage.examples = []

    def _runner_for(self, examples: list[ModelBatch]) -> ScheduleRunner:
        """The last runner, or a new one with larger buffers where some microbatch does not fit into its buffers."""
        activations = [self._activations(example) for example in examples]
        needed = tuple(
            tuple(buffer_spec_for([specs[tensor.value_id] for specs in activations]) for tensor in boundary)
            for boundary in self.local_stages.dataflow.boundaries
        )
        if self._runner is None or needed != _join_sizes(needed, self._runner.buffers, min):
            buffers = needed if self._runner is None else _join_sizes(needed, self._runner.buffers, max)
            self._runner = ScheduleRunner(
                self.local_stages.stages,
                buffers,
                self._plan.pipeline.schedule,
                self._plan.pipeline.microbatches,
                self._group,
                self._device,
                self.executed,
                # A backward pass in two parts would run recomputed blocks and compiled code twice.
                whole_backward=self._plan.memory.recompute != "none" or self._plan.compute.compile != "none",
            )
        return self._runner


def _join_sizes(needed: Buffers, current: Buffers, join: Callable[[int, int], int]) -> Buffers:
    """The larger (`max`) or the smaller (`min`) of two buffers, size by size. Where they differ in dtype or number of
    dimensions, `max` gives the needed one and `min` the current one."""

    def join_buffer(new: BufferSpec, old: BufferSpec) -> BufferSpec:
        if len(new.shape) != len(old.shape) or new.dtype != old.dtype:
            return new if join is max else old
        return BufferSpec(tuple(map(join, new.shape, old.shape)), new.dtype)

    return tuple(tuple(map(join_buffer, *boundary)) for boundary in zip(needed, current, strict=True))
