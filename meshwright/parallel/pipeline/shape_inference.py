"""Infers, by a forward pass of the whole model on fake tensors, the shapes of the tensors that cross each cut and of
what every module returns. The model's buffers and random generators are not changed."""

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blocks.generation_cache import disable_generation_caches
from meshwright.model_io.batch import ModelBatch
from meshwright.parallel.context.divide_model import SequenceDivision
from meshwright.parallel.pipeline.remote_modules import tensors_in
from meshwright.parallel.pipeline.stage_dataflow import CallKey, StageDataflow, TensorPosition
from meshwright.parallel.pipeline.transport import ActivationSpec, activation_spec
from meshwright.parallel.torch_private import FakeTensorMode, tree_flatten, tree_map
from meshwright.profile.experts import route_evenly
from meshwright.profile.fake import FakeRules

_MAX_CACHED = 64  # input signatures: batches of many sequence lengths would fill the memory


@dataclass(frozen=True)
class InferredShapes:
    """`fake_outputs` has what each call of a piece returns, on fake tensors. `activations` has, by value id, the shape
    and dtype of each tensor that crosses a cut, as it is sent: of a tensor in `divided_shapes`, which has the full
    shapes, ranks of the context axis send their parts."""

    fake_outputs: dict[CallKey, Any]
    activations: dict[int, ActivationSpec]
    divided_shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)


class ShapeInference:
    """Holds a copy of the model with fake tensors, and the shapes inferred for each kind of input so far."""

    def __init__(
        self,
        meta_model: nn.Module,
        dataflow: StageDataflow,
        device: torch.device,
        division: SequenceDivision | None = None,
    ) -> None:
        self.division = division  # how ranks of the context axis divide sequences; None without that axis
        # A stage's real tensors meet the fake outputs of remote modules: the result is a fake tensor.
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake_model = copy_with_tensors(meta_model, lambda tensor: self._fake(tensor, device))
        route_evenly(self.fake_model, batch=1)
        self._dataflow = dataflow
        self._cache: dict[Hashable, InferredShapes] = {}
        self._device = device

    def infer(
        self, example: ModelBatch, training: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> InferredShapes:
        """Returns the shapes for inputs of this example's structure, shapes and dtypes. Results are cached."""
        key = (_signature((example.arguments, example.keywords)), training, torch.is_grad_enabled())
        if key not in self._cache:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.pop(next(iter(self._cache)))
            shapes = self._run_on_fake_tensors(example, training, precision)
            self._cache[key] = self._divide_sequences(shapes, example)
        return self._cache[key]

    def _run_on_fake_tensors(
        self, example: ModelBatch, training: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> InferredShapes:
        recorder = _ShapeRecorder(self._dataflow)
        handles = []
        for name in self._dataflow.pieces:
            handles += recorder.add_hooks(name, self.fake_model.get_submodule(name))
        self.fake_model.train(training)
        try:
            with self.fake_mode:
                args, kwargs = tree_map(
                    lambda leaf: self._fake(leaf, self._device) if isinstance(leaf, Tensor) else leaf,
                    (example.arguments, example.keywords),
                )
            with self.fake_mode, FakeRules(fixes_random_scalars=False), precision():
                self.fake_model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return recorder.shapes

    def _divide_sequences(self, shapes: InferredShapes, example: ModelBatch) -> InferredShapes:
        division = self.division
        if division is None:
            return shapes
        length = division.length(example.arguments, example.keywords)
        divided = {key: spec.shape for key, spec in shapes.activations.items() if division.divides(spec.shape, length)}
        local = {
            key: replace(spec, shape=division.local_shape(spec.shape)) if key in divided else spec
            for key, spec in shapes.activations.items()
        }
        return InferredShapes(shapes.fake_outputs, local, divided)

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self.fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class _ShapeRecorder:
    """Forward hooks that record what the pieces of a model return and the tensors that cross a cut."""

    def __init__(self, dataflow: StageDataflow) -> None:
        self.shapes = InferredShapes({}, {})
        self._call_counts: Counter[str] = Counter()
        # Of each call: tensor index and value id of the crossing tensors among its outputs, and among its inputs.
        self._in_outputs: dict[CallKey, list[tuple[int, int]]] = {}
        self._in_inputs: dict[CallKey, list[tuple[int, int]]] = {}
        for tensor in (tensor for boundary in dataflow.boundaries for tensor in boundary):
            table = self._in_outputs if tensor.produced_at else self._in_inputs
            positions: Iterable[TensorPosition] = (tensor.produced_at,) if tensor.produced_at else tensor.consumed_at
            for position in positions:
                table.setdefault(position.call, []).append((position.tensor_index, tensor.value_id))

    def add_hooks(self, name: str, piece: nn.Module) -> list[Any]:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            self._record(self._in_inputs.get((name, self._call_counts[name]), []), (args, kwargs))

        def after(_: Any, __: Any, output: Any) -> None:
            call = (name, self._call_counts[name])
            self._call_counts[name] += 1
            self._record(self._in_outputs.get(call, []), output)
            self.shapes.fake_outputs[call] = tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output
            )

        return [piece.register_forward_pre_hook(before, with_kwargs=True), piece.register_forward_hook(after)]

    def _record(self, crossing: list[tuple[int, int]], tree: Any) -> None:
        tensors = tensors_in(tree) if crossing else []
        for tensor_index, value_id in crossing:
            self.shapes.activations[value_id] = activation_spec(tensors[tensor_index])


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device."""
    return copy_with_tensors(
        model, lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    )


def copy_with_tensors(model: nn.Module, new_tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the model whose parameters and buffers are what `new_tensor` returns for them; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(new_tensor(parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = new_tensor(buffer)
    copied = copy.deepcopy(model, memo)
    disable_generation_caches(copied)
    return copied


def _signature(tree: Any) -> Hashable:
    """Equal for inputs of the same structure, shapes, strides, types and values that are not tensors."""
    leaves, structure = tree_flatten(tree)
    return str(structure), tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )
