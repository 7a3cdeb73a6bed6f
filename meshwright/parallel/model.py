"""`ParallelModel`: a model on which a plan was applied. Training steps, evaluation and checkpoints work on it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.blocks.borrowed_samples import borrowed_samples
from meshwright.blocks.power_iteration import power_iterations, without_power_iteration
from meshwright.collectives.small_sums import SmallSums
from meshwright.model_io.batch import ModelBatch, at_least_fp32
from meshwright.parallel import shard
from meshwright.parallel.attention_fastpath import without_attention_fastpath
from meshwright.parallel.backward_wait import run_backward
from meshwright.parallel.clip import clip_
from meshwright.parallel.compiled import Compilation, OneGraph
from meshwright.parallel.context.sequence_view import gather_sequence_views
from meshwright.parallel.expert.loads import ExpertLoads
from meshwright.parallel.mesh import MeshPosition
from meshwright.parallel.pipeline.pipeline import PipelineExecutor
from meshwright.parallel.precision import forward_precision, fp32_product_precision
from meshwright.parallel.replicate.gradient_averaging import GradientAverager
from meshwright.parallel.replicate.local_steps import LocalSteps
from meshwright.parallel.replicate.replicate import broadcast_buffers, forget_compressed_gradients
from meshwright.parallel.tensor.dimension_partition import shard_input_columns
from meshwright.parallel.tensor.memory.shared_memory import refuse_lost_writes
from meshwright.parallel.tensor.shard_view import gather_shard_views
from meshwright.parallel.torch_private import as_one_graph, comm_hook_states
from meshwright.parallel.weights.layout import ParameterLayout, TiedLayout
from meshwright.parallel.weights.state import full_gradients, full_state
from meshwright.plan import Plan

Examples = Sequence[tuple[ModelBatch, int]]  # microbatches, with their numbers of samples
MakeAverager = Callable[[], GradientAverager]
LossFunction = Callable[[Any, Any, bool], Any]  # (model output, target, whether the microbatch has samples) → any value
MicrobatchLoss = Callable[[int, Any], Tensor]  # (index of the microbatch, that value) → the loss to differentiate


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of the user's model, with the methods that train, evaluate and save it.

    `module` has this rank's parameters under their names in the user's model. `runner` is the module that is called in
    training: DDP around `module`, or `module` itself. `layouts` has, by parameter name, which part of each split
    parameter this rank holds; `tied` are the parameters that other pipeline ranks hold too. `state_names` are all names
    in the `state_dict` of the user's model.
    """

    plan: Plan
    module: nn.Module
    runner: nn.Module
    mesh: DeviceMesh | None
    position: MeshPosition
    device: torch.device
    state_names: tuple[str, ...]
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    tied: tuple[TiedLayout, ...] = ()
    pipeline: PipelineExecutor | None = None
    make_averager: MakeAverager | None = None  # None if FSDP2 averages gradients, or if nothing is averaged
    local_steps: LocalSteps | None = None
    sums: SmallSums | None = None  # sums of a few numbers over all ranks; None on a single rank
    compilation: Compilation = field(default_factory=Compilation)
    expert_loads: ExpertLoads | None = None  # how evenly routers use experts that are divided over ranks

    @property
    def needs_equal_batch_counts(self) -> bool:
        """Whether data ranks communicate in a forward pass. If they do, all of them have to run equally many
        batches."""
        split_over_replicate = any(layout.axis == "replicate" for layout in self.layouts.values())
        return self.plan.axes.shard > 1 or self.plan.axes.expert > 1 or split_over_replicate

    @property
    def weight_division(self) -> tuple[dict[str, ParameterLayout], tuple[TiedLayout, ...], DeviceMesh | None]:
        """(`layouts`, `tied`, `mesh`): how the plan has divided the weights, as the checkpoint functions take it."""
        return self.layouts, self.tied, self.mesh

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters (or shards) that this rank holds, by their names in the user's model's `named_parameters`."""
        canonical = {tie.local_name: tie.name for tie in self.tied}
        return {canonical.get(name, name): parameter for name, parameter in self.module.named_parameters()}

    # ---- training

    @cached_property
    def gradient_averager(self) -> GradientAverager | None:
        """Averages the gradients of data ranks. With DDP, only backward passes of a user's own loop need it."""
        return self.make_averager() if self.make_averager else None

    @cached_property
    def _waits_after_backward(self) -> bool:
        """Whether the host waits for exchanges of torch's own at the end of a backward pass, whose time is counted. On
        a GPU only the device waits; our own hooks of DDP count it themselves."""
        averages = isinstance(self.runner, DistributedDataParallel) and not comm_hook_states(self.runner)
        return self.device.type == "cpu" and (averages or self.plan.axes.shard > 1)

    @cached_property
    def _power_iterations(self) -> list[Any]:
        return power_iterations(self.module)

    def run_microbatches(self, examples: Examples, loss_function: LossFunction, loss_of: MicrobatchLoss) -> None:
        """Runs the forward and backward passes of one step, and leaves the mean of the data ranks' gradients in the
        parameters (with `local_steps`, after the first `local_after` steps, this rank's own gradients). `loss_function`
        and `loss_of` are called on the ranks that have the model's output. A pipeline needs all microbatches of the
        plan, also those without samples."""
        with fp32_product_precision(self.plan, self.device.type):
            if self.pipeline is not None:
                self._run_stages(self.pipeline, examples, loss_function, loss_of)
                return
            last = len(examples) - 1
            forward = self._forward_of(loss_function)
            for number, (example, samples) in enumerate(examples):
                power_iteration = without_power_iteration(self._power_iterations) if number else nullcontext()
                borrowed = nullcontext() if samples else borrowed_samples(self.module)
                with self._gradient_synchronization(number == 0, number == last), power_iteration, borrowed:
                    value = forward(example.arguments, example.keywords, example.target, samples > 0)
                    loss = loss_of(number, value)
                    run_backward(loss) if self._waits_after_backward and loss.requires_grad else loss.backward()

    def _forward_of(self, loss_function: LossFunction) -> Callable[..., Any]:
        """Returns the function that computes the model's output and then the value of `loss_function`, compiled as the
        plan says. This and `_compiled_loss` are the only places where more than the model's own code is compiled."""
        compilation = self.compilation
        if compilation.whole and not compilation.apart:
            return self._compile_once("together", loss_function, self._together)
        if compilation.whole:
            model = self._compile_once("model", self.runner, compilation.function)
            return self._with_loss(model, self._compile_once("loss", loss_function, self._as_one_graph))
        return self._with_loss(self.runner, self._compiled_loss(loss_function))

    def _compiled_loss(self, loss_function: LossFunction) -> LossFunction:
        """Returns the loss function, compiled if the plan compiles it by itself."""
        if not self.compilation.loss:
            return loss_function
        return self._compile_once("loss", loss_function, self._as_one_graph)

    def _with_loss(self, model: Callable[..., Any], loss_function: LossFunction) -> Callable[..., Any]:
        """Returns the function that calls the model and the loss function. The compiler traces it: nothing in it may
        register or cache anything."""
        plan, device_type = self.plan, self.device.type

        def forward(arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, has_samples: bool) -> Any:
            with forward_precision(plan, device_type):
                output = model(*arguments, **keywords)
            return loss_function(at_least_fp32(output), target, has_samples)

        return forward

    def _together(self, loss_function: LossFunction) -> Callable[..., Any]:
        """Returns the function that computes output and loss, compiled as one graph. It raises an error if the compiler
        cannot trace it as one."""
        compiled = self.compilation.function(self._with_loss(self.runner, loss_function))

        def forward(*args: Any) -> Any:
            with as_one_graph():
                return compiled(*args)

        return forward

    def _as_one_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return OneGraph(function, self.compilation)

    def _compile_once(
        self, name: str, function: Any, compile_function: Callable[[Any], Callable[..., Any]]
    ) -> Callable[..., Any]:
        last = self._compiled_functions.get(name)
        if last is None or last[0] != function:
            last = self._compiled_functions[name] = (function, compile_function(function))
        return last[1]

    @cached_property
    def _compiled_functions(self) -> dict[str, tuple[Any, Callable[..., Any]]]:
        """The last function of each name that was compiled for training, and the compiled one."""
        return {}

    def _run_stages(
        self, pipeline: PipelineExecutor, examples: Examples, loss_function: LossFunction, loss_of: MicrobatchLoss
    ) -> None:
        loss_function = self._compiled_loss(loss_function)

        def loss_of_output(number: int, output: Any) -> Tensor:
            example, samples = examples[number]
            return loss_of(number, loss_function(output, example.target, samples > 0))

        self.align_buffers()
        pipeline.run(examples, loss_of_output)
        if self.plan.axes.shard > 1:
            for stage in pipeline.local_stages.stages:
                shard.finish_step(stage)
        if self.gradient_averager is not None:
            self.gradient_averager.finish()

    def _gradient_synchronization(self, first: bool, last: bool) -> AbstractContextManager[Any]:
        """Returns the context for the forward and backward pass of one microbatch. Gradients are averaged over the data
        ranks in the last microbatch of a step only; FSDP2 may reduce-scatter them in earlier ones too (shard.py)."""
        if self.plan.axes.shard > 1:
            return shard.gradient_synchronization(self.module, self.plan, first, last)
        if isinstance(self.runner, DistributedDataParallel):
            return nullcontext() if last else self.runner.no_sync()
        if self.gradient_averager is not None:
            if first and self.mesh is not None:
                broadcast_buffers(self.module, self.mesh)
            return self.gradient_averager.averaging(last)
        return nullcontext()

    def _forward(self, model: nn.Module, example: ModelBatch) -> Any:
        with forward_precision(self.plan, self.device.type):
            output = model(*example.arguments, **example.keywords)
        refuse_lost_writes(at_end=True)
        return at_least_fp32(output)

    def with_input_columns(self, example: ModelBatch, width: int) -> ModelBatch:
        """Returns the example with its first input wrapped in a `ShardView`: the input has only this rank's columns,
        and the model sees a tensor of all `width` columns."""
        assert self.mesh is not None, "columns are divided over the tensor axis"
        first, *others = example.arguments
        return replace(example, arguments=(shard_input_columns(first, width, self.mesh), *others))

    def clip_(self, max_norm: float) -> Tensor:
        """Scales the gradients in place so that the norm of the whole model's gradient is at most `max_norm`. Returns
        the norm before scaling, the same on every rank."""
        return clip_(self._gradients(), self.layouts, self.tied, self.mesh, max_norm)

    def reset_compression(self) -> None:
        """Makes PowerSGD forget what it keeps of earlier gradients. If one of them was NaN, all later ones would be."""
        if isinstance(self.runner, DistributedDataParallel):
            forget_compressed_gradients(self.runner)

    def _gradients(self) -> list[tuple[str, Tensor | None]]:
        return [(name, parameter.grad) for name, parameter in self.module.named_parameters()]

    # ---- evaluation

    def evaluate(self, example: ModelBatch) -> Any:
        """Runs a forward pass. Returns the model's full output, or None on ranks that do not run the last pipeline
        stage."""
        with without_attention_fastpath(), fp32_product_precision(self.plan, self.device.type):
            if self.pipeline is not None:
                return gather_shard_views(gather_sequence_views(self.pipeline.evaluate(example)))
            # Not `runner`, because DDP may communicate in a forward pass, and data ranks may have different numbers of
            # batches.
            return gather_shard_views(gather_sequence_views(self._forward(self.module, example)))

    def train(self, mode: bool = True) -> None:
        self.runner.train(mode)

    # ---- weights

    def align_buffers(self) -> None:
        """Makes the buffers equal on all data ranks, and also the weights if the ranks have taken local steps."""
        if self.local_steps is not None:
            self.local_steps.average_weights()
        if self.mesh is not None:
            broadcast_buffers(self.module, self.mesh)

    def reshard(self) -> None:
        """Frees the full weights that FSDP2 gathered for an evaluation. The module's parameters are then the shards."""
        if self.plan.axes.shard > 1:
            for module in self.pipeline.local_stages.stages if self.pipeline else (self.module,):
                shard.reshard(module)

    def full_state(self) -> dict[str, Any]:
        """Returns the `state_dict` of the user's model with full tensors, on every rank. All ranks have to call it. On
        one rank, or if all axes but replicate are 1 and nothing is split, the tensors are the module's own; otherwise
        they are copies on the CPU."""
        if self.mesh is None or (self.plan.world_size == self.plan.axes.replicate and not self.layouts):
            return self.module.state_dict()
        self.reshard()
        return full_state(self.module, self.layouts, self.mesh, order=self.state_names)

    def full_gradients(self) -> dict[str, Tensor]:
        """Returns the full gradients on the CPU, by their parameters' names in the user's model, without those that are
        None. All ranks have to call it."""
        return full_gradients(self.module, self.layouts, self.mesh, tied=self.tied, order=self.state_names)
