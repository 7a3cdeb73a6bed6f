"""`ParallelModel`: a model under a plan, as a training step, an evaluation and a checkpoint use it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.batch import Example, at_least_fp32
from meshwright.collectives.sums import Sums
from meshwright.parallel import shard
from meshwright.parallel.clip import clip_
from meshwright.parallel.mesh import Place
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.plain_attention import plain_attention
from meshwright.parallel.precision import arithmetic, forward_precision
from meshwright.parallel.replicate.combine import Combiner
from meshwright.parallel.replicate.local_steps import LocalSteps
from meshwright.parallel.replicate.replicate import align_buffers
from meshwright.parallel.tensor.dimension import part_of_input
from meshwright.parallel.tensor.shard_view import gathered
from meshwright.parallel.weights.layout import Layout, Tied
from meshwright.parallel.weights.state import full_gradients, full_state
from meshwright.plan import Plan

Examples = Sequence[tuple[Example, int]]  # microbatches, with their numbers of samples
LossOf = Callable[[int, Any], Tensor]  # of a microbatch's number and the model's output: what backward starts from


@dataclass(frozen=True)
class ParallelModel:
    """`module` holds the rank's part of the user's model under its own names, `layouts` say where divided weights lie
    in the whole ones, `tied` which are copies of those on other stages. `order` has all the untouched model's names."""

    plan: Plan
    module: nn.Module
    runner: nn.Module
    mesh: DeviceMesh | None
    place: Place
    device: torch.device
    order: tuple[str, ...]
    layouts: dict[str, Layout] = field(default_factory=dict)
    tied: tuple[Tied, ...] = ()
    pipeline: Pipeline | None = None
    combiner: Combiner | None = None
    local: LocalSteps | None = None
    sums: Sums | None = None  # over all ranks; None: there is one

    @property
    def in_step(self) -> bool:
        """Whether ranks with other samples need each other in a forward pass: then all run equally many."""
        wide = any(layout.axis == "replicate" for layout in self.layouts.values())
        return self.plan.axes.shard > 1 or wide

    @property
    def division(self) -> tuple[dict[str, Layout], tuple[Tied, ...], DeviceMesh | None]:
        """How the plan has divided the model, as a checkpoint wants to know it."""
        return self.layouts, self.tied, self.mesh

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank holds, under the names of the untouched model."""
        canonical = {tie.local: tie.name for tie in self.tied}
        return {canonical.get(name, name): parameter for name, parameter in self.module.named_parameters()}

    # ---- training

    def run(self, examples: Examples, loss_of: LossOf) -> None:
        """Leaves the mean of the data ranks' gradients in the parameters; `loss_of` is asked where a loss is known.
        Stages want all microbatches of the plan, those of no samples too."""
        with arithmetic(self.plan, self.device.type):
            if self.pipeline is not None:
                self._run_stages(self.pipeline, examples, loss_of)
                return
            last = len(examples) - 1
            for number, (example, _) in enumerate(examples):
                with self._combining(number == 0, number == last):
                    loss_of(number, self._forward(self.runner, example)).backward()

    def _run_stages(self, pipeline: Pipeline, examples: Examples, loss_of: LossOf) -> None:
        self.align_buffers()
        pipeline.run(examples, loss_of)
        if self.plan.axes.shard > 1:
            for stage in pipeline.cutting.stages:
                shard.finish(stage)
        if self.combiner is not None:
            self.combiner.finish()

    def _combining(self, first: bool, last: bool) -> AbstractContextManager[Any]:
        """Gradients travel in the backward pass of a step's last microbatch only."""
        if self.plan.axes.shard > 1:
            return shard.combining(self.module, self.plan, first, last)
        if isinstance(self.runner, DistributedDataParallel):
            return nullcontext() if last else self.runner.no_sync()
        if self.combiner is not None:
            if first and self.mesh is not None:
                align_buffers(self.module, self.mesh)
            return self.combiner.combining(last)
        return nullcontext()

    def _forward(self, model: nn.Module, example: Example) -> Any:
        with forward_precision(self.plan, self.device.type):
            output = model(*example.arguments, **example.keywords)
        return at_least_fp32(output)

    def with_columns(self, example: Example, width: int) -> Example:
        """An example whose first input holds this rank's columns, as a part of the whole one."""
        assert self.mesh is not None, "columns are divided over the tensor axis"
        first, *others = example.arguments
        return replace(example, arguments=(part_of_input(first, width, self.mesh), *others))

    def clip_(self, max_norm: float) -> Tensor:
        """Scales the gradients to at most that norm of all of them together; returns the norm they had."""
        return clip_(self._gradients(), self.layouts, self.tied, self.mesh, max_norm)

    def _gradients(self) -> list[tuple[str, Tensor | None]]:
        return [(name, parameter.grad) for name, parameter in self.module.named_parameters()]

    # ---- evaluation

    def evaluate(self, example: Example) -> Any:
        """The whole output, on ranks that know it; None on those of other stages."""
        with plain_attention(), arithmetic(self.plan, self.device.type):
            if self.pipeline is not None:
                return gathered(self.pipeline.evaluate(example))
            # The bare module: where ranks need nothing of each other, they may have different numbers of batches.
            return gathered(self._forward(self.module, example))

    def train(self, mode: bool = True) -> None:
        self.runner.train(mode)

    # ---- weights

    def align_buffers(self) -> None:
        """And weights, where ranks have taken steps alone: whoever looks at the model finds one."""
        if self.local is not None:
            self.local.align()
        if self.mesh is not None:
            align_buffers(self.module, self.mesh)

    def reshard(self) -> None:
        """Frees what an evaluation has left gathered, so that the parameters are the divided ones."""
        for each in self.pipeline.cutting.stages if self.pipeline else (self.module,):
            shard.reshard(each)

    def full_state(self) -> dict[str, Any]:
        """The untouched model's `state_dict`, on every rank; all ranks call it."""
        if self.mesh is None or (self.plan.world_size == self.plan.axes.replicate and not self.layouts):
            return self.module.state_dict()
        self.reshard()
        return full_state(self.module, self.layouts, self.mesh, order=self.order)

    def full_gradients(self) -> dict[str, Tensor]:
        return full_gradients(self.module, self.layouts, self.mesh, tied=self.tied, order=self.order)
