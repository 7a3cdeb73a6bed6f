"""`Stage`: runs the model's own forward pass with the pieces of one pipeline stage, on received and sent buffers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from meshwright.blocks.borrowed_samples import borrowed_samples
from meshwright.errors import MeshwrightError
from meshwright.model_io.batch import ModelBatch
from meshwright.parallel.context.sequence_view import gather_sequence_views
from meshwright.parallel.pipeline.remote_modules import ActiveForward, StageForward, StageTransfers, positions_by_call
from meshwright.parallel.pipeline.shape_inference import InferredShapes, ShapeInference
from meshwright.parallel.pipeline.stage_dataflow import BoundaryTensor, CallKey, StageDataflow, TensorPosition
from meshwright.parallel.pipeline.transport import ActivationSpec, BufferSpec, pack_for_send, unpack_received
from meshwright.parallel.tensor.memory.shared_memory import refuse_lost_writes


class Stage(nn.Module):
    """One stage. Called with the received buffers, it returns the buffers to send; the last stage returns what
    `finish` makes of the model's output. `microbatch` is the index of the example that runs."""

    def __init__(self, index: int, model: nn.Module, dataflow: StageDataflow, active_forward: ActiveForward) -> None:
        super().__init__()
        boundaries = dataflow.boundaries
        self.index = index
        self.model = model
        self.transfers = _stage_transfers(dataflow, index)
        self.active_forward = active_forward
        self.received: tuple[BoundaryTensor, ...] = boundaries[index - 1] if index else ()
        self.sent: tuple[BoundaryTensor, ...] = boundaries[index] if index < len(boundaries) else ()
        self.is_last = index == len(boundaries)
        self.reuses_weights = index in dataflow.stages_reusing_weights
        self.mirrored_modules: tuple[tuple[nn.Module, nn.Module], ...] = ()
        self.private_buffers: tuple[tuple[nn.Module, nn.Module, str], ...] = ()
        self.shape_inference: ShapeInference | None = None
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.examples: list[ModelBatch] = []
        self.microbatch = 0
        self.borrowed: Sequence[bool] = ()  # which of the examples have no weight; empty if all have one
        self.send_buffers: tuple[BufferSpec, ...] = ()  # if empty, buffers have the sizes of the activations
        self.compute: Callable[..., Any] = self.run_model  # or a function that is compiled from it
        self.finish: Callable[[int, Any], Any] = lambda _, output: output

    def forward(self, *buffers: Tensor) -> Any:
        assert self.shape_inference is not None, "the stage is not part of a pipeline yet"
        example = self.examples[self.microbatch]
        self._update_mirrored_modules()
        shapes = self.shape_inference.infer(example, self.model.training, self.precision)
        received: tuple[Tensor, ...] = ()
        if self.received:
            received = unpack_received([shapes.activations[tensor.value_id] for tensor in self.received], buffers)
            received = self._as_sequences(received, shapes)
        is_borrowed = bool(self.borrowed) and self.borrowed[self.microbatch]
        with self.precision(), borrowed_samples(self.model) if is_borrowed else nullcontext():
            result = self.compute(received, example.arguments, example.keywords, shapes.fake_outputs)
        if self.is_last:
            return self.finish(self.microbatch, result)
        values: dict[int, Tensor] = result
        specs = [shapes.activations[tensor.value_id] for tensor in self.sent]
        sent = [self._checked(tensor, spec, values, shapes) for tensor, spec in zip(self.sent, specs, strict=True)]
        exact_buffers = [BufferSpec(spec.memory_shape, spec.transfer_dtype) for spec in specs]
        return pack_for_send(specs, self.send_buffers or exact_buffers, sent)

    def run_model(
        self,
        received: tuple[Tensor, ...],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        fake_outputs: Mapping[CallKey, Any],
    ) -> Any:
        """Runs the model's forward pass with what this stage received. Returns the model's output in the last stage,
        and in other stages the received tensors and those to send, by value id."""
        values = {tensor.value_id: value for tensor, value in zip(self.received, received, strict=True)}
        with self.active_forward.running(StageForward(self.transfers, fake_outputs, values)):
            output = self.model(*arguments, **keywords)
        refuse_lost_writes(at_end=True)
        return output if self.is_last else values

    def _as_sequences(self, received: tuple[Tensor, ...], shapes: InferredShapes) -> tuple[Tensor, ...]:
        """The received tensors, of which ranks of the context axis have their parts."""
        division = self.shape_inference.division if self.shape_inference else None
        if division is None:
            return received
        full_shapes = (shapes.divided_shapes.get(tensor.value_id) for tensor in self.received)
        return tuple(
            value if shape is None else division.view_of(value, shape)
            for value, shape in zip(received, full_shapes, strict=True)
        )

    def _checked(
        self, tensor: BoundaryTensor, spec: ActivationSpec, values: dict[int, Tensor], shapes: InferredShapes
    ) -> Tensor:
        """The tensor's value, or an error where the forward pass did not compute it or gave it another shape. Of a
        sequence that ranks of the context axis divide, this rank's part."""
        position = tensor.produced_at or tensor.consumed_at[0]
        name = position.call[0]
        if tensor.value_id not in values:
            raise MeshwrightError(f"pipeline stage {self.index} did not run {name}, whose result the next stage needs")
        value = values[tensor.value_id]
        if self.shape_inference and (division := self.shape_inference.division):
            is_divided = value.dim() > 1 and tuple(value.shape) == shapes.divided_shapes.get(tensor.value_id)
            value = division.local_part(value) if is_divided else gather_sequence_views(value)
        if tuple(value.shape) != spec.shape:
            raise MeshwrightError(
                f"the tensor of {name} that pipeline stage {self.index} sends has shape {tuple(value.shape)} instead of"
                f" {spec.shape}"
            )
        return value

    def mirror_outer_modules(
        self, local_module: nn.Module, outer: Iterable[str], with_parameters: Iterable[str], mutated: Iterable[str]
    ) -> None:
        """Connects this stage's copies of the `outer` modules with those of the rank's `local_module`, if a rank has
        several stages. The copies share the buffers and follow the training mode. The modules in `with_parameters`
        share the parameter table too: a parameter that is replaced in one is replaced in both. The buffers named in
        `mutated` are copied for this stage in every forward pass, because only one stage may write to the shared
        ones."""
        self.mirrored_modules = tuple(
            (self.model.get_submodule(name), local_module.get_submodule(name)) for name in outer
        )
        for mirror, source in self.mirrored_modules:
            mirror._buffers = source._buffers
            mirror._parameters = dict.fromkeys(source._parameters)
        for name in with_parameters:
            self.model.get_submodule(name)._parameters = local_module.get_submodule(name)._parameters
        owners_and_keys = [name.rpartition(".") for name in mutated]
        self.private_buffers = tuple(
            (self.model.get_submodule(owner), local_module.get_submodule(owner), key)
            for owner, _, key in owners_and_keys
        )

    def _update_mirrored_modules(self) -> None:
        for mirror, source in self.mirrored_modules:
            mirror.training = source.training
        for mirror, source, key in self.private_buffers:
            # Each stage of a rank runs the outer forward pass: only one of them may write to buffers such as counters.
            buffer = source._buffers[key]
            mirror._buffers = {**source._buffers, key: None if buffer is None else buffer.clone()}


def _stage_transfers(dataflow: StageDataflow, stage: int) -> StageTransfers:
    received = dataflow.boundaries[stage - 1] if stage else ()
    sent = dataflow.boundaries[stage] if stage < len(dataflow.boundaries) else ()
    return StageTransfers(
        local_calls=frozenset(call for call, stage_of_call in dataflow.stage_of.items() if stage_of_call == stage),
        received_outputs=positions_by_call(_produced(received)),
        received_inputs=positions_by_call(_consumed(received)),
        sent_outputs=positions_by_call(_produced(sent)),
        sent_inputs=positions_by_call(_consumed(sent)),
        passed_through=dataflow.passed_through,
    )


def _produced(tensors: tuple[BoundaryTensor, ...]) -> Iterator[tuple[TensorPosition, int]]:
    return ((tensor.produced_at, tensor.value_id) for tensor in tensors if tensor.produced_at)


def _consumed(tensors: tuple[BoundaryTensor, ...]) -> Iterator[tuple[TensorPosition, int]]:
    return (
        (position, tensor.value_id) for tensor in tensors if not tensor.produced_at for position in tensor.consumed_at
    )
