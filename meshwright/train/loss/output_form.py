"""Random values in the form of a model's output, for trying a loss function without running the model."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blocks.block_state import BlockState
from meshwright.blocks.power_iteration import power_iterations, without_power_iteration
from meshwright.model_io.batch import split_batch
from meshwright.model_io.output_trees import register_dataclasses
from meshwright.profile.fake import FakeRules, fake_batch, fake_model, one_sequence_per_row
from meshwright.profile.torch_private import FakeTensorMode
from meshwright.profile.tracing.real_tensors import model_device
from meshwright.train.torch_private import (
    AnyBatchNorm,
    AnyDropout,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

_LARGEST_OUTPUT = 2**24  # numbers; of a larger output, fewer positions are made
_POSITIONS = 64  # of a dimension that is made shorter


@dataclass(frozen=True)
class OutputForm:
    """The structure of a model's output, its values for a number of samples, and for each value the dimension that
    grows with the number of samples (None if there is none). Tensors among the values have a shape and a dtype, but no
    memory. Other values, such as a cache of keys and values, are the same in all outputs."""

    structure: Any
    values: tuple[Any, ...]
    sample_dims: tuple[int | None, ...]
    samples: int

    def make(self, generator: torch.Generator, dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> Any:
        """Returns an output of random tensors. Floating-point tensors are normally distributed, in `dtype`, and changed
        by `change`; other tensors hold zeros and ones."""

        def make_leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.dtype.is_floating_point:
                return change(torch.randn(value.shape, generator=generator, dtype=dtype))
            return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)

        return tree_unflatten([make_leaf(value) for value in self.values], self.structure)

    def rows(self, output: Any, sample: int) -> Any:
        """Returns the part of an output that belongs to one sample."""
        leaves, structure = tree_flatten(output)
        parts = []
        for leaf, dim in zip(leaves, self.sample_dims, strict=True):
            size = 0 if dim is None else leaf.shape[dim] // self.samples
            parts.append(leaf if dim is None else leaf.narrow(dim, sample * size, size))
        return tree_unflatten(parts, structure)


def shorten_sequences(form: OutputForm, target: Any) -> tuple[OutputForm, Any]:
    """Returns the form and the target, with fewer positions if the output is large, such as that of a language model
    with long sequences and many words. A dimension that both have, and that is not the samples', becomes shorter."""
    if all(value.numel() <= _LARGEST_OUTPUT for value in form.values if isinstance(value, Tensor)):
        return form, target
    dims = [
        [] if not isinstance(value, Tensor) else [size for dim, size in enumerate(value.shape) if dim != samples_dim]
        for value, samples_dim in zip(form.values, form.sample_dims, strict=True)
    ]
    lengths = {
        size
        for value in tree_leaves(target)
        if isinstance(value, Tensor)
        for size in value.shape[1:]
        if size > _POSITIONS and any(size in sizes for sizes in dims)
    }

    def shorten(value: Any, samples_dim: int | None = 0) -> Any:
        if not isinstance(value, Tensor):
            return value
        for dim, size in enumerate(value.shape):
            if dim != samples_dim and size in lengths:
                kept = torch.linspace(0, size - 1, _POSITIONS).long()
                value = value.index_select(dim, kept.to(value.device))
        return value

    def without_memory(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor)
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_tensor else value

    shorter = tuple(map(shorten, map(without_memory, form.values), form.sample_dims))
    return replace(form, values=shorter), tree_map(shorten, target)


class FakeModel:
    """A copy of a model without memory, from which the form of its output can be found later, when the plan has changed
    the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self._original = model
        self._mode = FakeTensorMode()
        self._model: nn.Module | None = None  # for a model that cannot be copied
        with suppress(Exception):  # whatever the model's own code raises when it is copied
            self._model = fake_model(model, self._mode)

    def output_form(self, sample: Any, samples: int, target_key: str | None) -> OutputForm | None:
        """Returns the form of the output for batches of `samples` samples like the sample batch; None if the model
        cannot run on tensors without values, or if its output has no tensors."""
        if self._model is None:
            return None
        try:
            outputs = [self._forward(sample, count, target_key) for count in (samples, samples + 1)]
        except Exception:  # whatever the model's own code raises on tensors without values
            return None
        return _form_of(outputs, samples)

    def real_form(self, batches: Sequence[Any], samples: int, target_key: str | None) -> OutputForm | None:
        """Returns the form of the output for `samples` samples, found by running the model itself on two
        batches: one of so many samples, and one with one more. The model is left as it was. None if it cannot
        run on them. If a plan has divided the model, all ranks call this together."""
        model, modes = self._original, {module: module.training for module in self._original.modules()}
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            return None
        state, device = BlockState("the model", model), model_device(model)
        record = state.new_record()
        try:
            for module in modes:  # their statistics would change
                module.training = module.training and not isinstance(module, AnyBatchNorm | AnyDropout)
            iterations = without_power_iteration(power_iterations(model))
            devices = [device] if device.type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices), iterations, state.record(record):
                outputs = [self._real_forward(batch, device, target_key) for batch in batches]
        except Exception:  # whatever the model's own code raises on so few samples
            return None
        finally:
            record.restore()
            for module, mode in modes.items():
                module.training = mode
        return _form_of(outputs, samples)

    def _real_forward(self, batch: Any, device: torch.device, target_key: str | None) -> Any:
        moved = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
        inputs = split_batch(moved, target_key)
        output = self._original(*inputs.arguments, **inputs.keywords)
        register_dataclasses(output)
        return output

    def _forward(self, sample: Any, samples: int, target_key: str | None) -> Any:
        assert self._model is not None
        inputs = split_batch(fake_batch(sample, samples, self._mode), target_key)
        with self._mode, torch.no_grad(), FakeRules(), one_sequence_per_row(sample):
            output = self._model(*inputs.arguments, **inputs.keywords)
        register_dataclasses(output)
        return output


def warn_untried(problem: str) -> None:
    """Says that nobody knows what a loss function is a mean over."""
    warnings.warn(
        f"what the loss is a mean over could not be tried, because {problem}: it is taken as a mean over samples. If it"
        " is a sum or a mean over something else, let it return a pair (sum, count)",
        stacklevel=3,
    )


def _form_of(outputs: Sequence[Any], samples: int) -> OutputForm | None:
    """Returns the form of two outputs, of `samples` samples and of one more. None if they have no tensors."""
    (leaves, structure), (larger, _) = (tree_flatten(output) for output in outputs)
    if len(leaves) != len(larger) or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    dims = [_differing_dim(a, b) for a, b in zip(leaves, larger, strict=True)]
    return OutputForm(structure, tuple(leaves), tuple(dims), samples)


def _differing_dim(a: Any, b: Any) -> int | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None
    return next((dim for dim in range(a.dim()) if a.dim() == b.dim() and a.shape[dim] != b.shape[dim]), None)
