"""Finds what breaks plans that copy or shard a model: state that the forward pass changes by the samples that it sees.
On several ranks it would follow the samples of one of them; on one device it follows the whole batch.

State that a forward pass changes is found on fake tensors, which takes little time. Only a model with such state then
runs on parts of the sample batch: state that comes out the same, such as a counter, is right on every rank. BatchNorm
and other modules with running statistics are left out: plans say over which samples these are taken.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.randomness import preserve_generators
from meshwright.model_io.batch import split_batch
from meshwright.profile.fake import FakeRules, batch_size, fake_batch, fake_model, one_sequence_per_row
from meshwright.profile.torch_private import FakeTensorMode
from meshwright.proof.before_training.reduction import Reduction, parameter_count, reduced_training
from meshwright.proof.before_training.training import Training
from meshwright.proof.reference.groups import uses_batch_statistics
from meshwright.proof.torch_private import tree_leaves, tree_map

_LARGEST_TRIED = 2 * 10**8  # weights of a model that is copied and run
_TOLERANCE = 1e-5  # relative to the largest number of a tensor, in fp32
_SEED = 0  # of each run, so that dropout is the same in all


@dataclass(frozen=True)
class BatchState:
    """A module, and the buffer or attribute of it that follows the batch."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


def find_batch_state(training: Training) -> BatchState | None:
    """Returns the first state of the model that follows the samples of its batches; None if there is none, or if the
    model cannot be run to find out. Nothing of the training is changed."""
    if parameter_count(training.model) > _LARGEST_TRIED:
        return None
    # A loop with a loss of its own may call the model with the whole batch, or without its target.
    for key in dict.fromkeys((training.target_key, None)):
        with preserve_generators():
            try:
                changed = list(_changed_state(training, key))
                return next((state for state in changed if _follows_batch(training, state, key)), None)
            except Exception:  # code that depends on the values of tensors, or a batch that cannot be divided
                continue
    return None


def find_changed_parameter(training: Training) -> BatchState | None:
    """Returns the first parameter that a forward pass writes to; None if there is none, or if the model cannot be run
    without values."""
    for key in dict.fromkeys((training.target_key, None)):
        with preserve_generators():
            try:
                changed = _changed_state(training, key)
                modules = dict(training.model.named_modules())
                return next((state for state in changed if state.name in modules[state.module]._parameters), None)
            except Exception:  # code that depends on the values of tensors
                continue
    return None


def _changed_state(training: Training, target_key: str | None) -> Iterator[BatchState]:
    """Yields the buffers and attributes that a forward pass in training mode changes, other than running statistics."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    samples = batch_size(training.sample_batch)
    model = fake_model(training.model, mode, (), samples).train()
    inputs = split_batch(fake_batch(training.sample_batch, samples, mode), target_key)
    modules = {name: module for name, module in model.named_modules() if not uses_batch_statistics(module)}
    before = {name: _versions(module) for name, module in modules.items()}
    with mode, torch.no_grad(), FakeRules(), one_sequence_per_row(training.sample_batch):
        model(*inputs.arguments, **inputs.keywords)
    for name, module in modules.items():
        after = _versions(module)
        yield from (BatchState(name, key) for key in after if after[key] != before[name].get(key))


def _versions(module: nn.Module) -> dict[str, Any]:
    """Returns a value for each buffer and attribute of a module that changes when it is replaced or written to."""
    state = {**vars(module), **module._buffers, **module._parameters}
    return {key: _version(value) for key, value in state.items() if key != "training" and not _is_table(key, value)}


def _is_table(key: str, value: Any) -> bool:
    """Whether this is one of the tables that every module has, with its children, parameters and hooks."""
    return key.startswith("_") and hasattr(nn.Module(), key)


def _version(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if type(value) in (list, tuple, dict):  # a class derived of them, such as Lightning's, is a leaf of its own
        return [_version(leaf) for leaf in tree_leaves(value)]
    return value if isinstance(value, int | float | str | bool | None) else id(value)


def _follows_batch(training: Training, state: BatchState, target_key: str | None) -> bool:
    """Whether the state differs after forward passes with different samples and, if it is no buffer, changes what the
    next forward pass computes: an attribute that is written before it is read changes nothing."""
    samples = batch_size(training.sample_batch)
    if samples < 2:
        return False
    half_size = samples // 2
    halves = [_rows(training.sample_batch, rows) for rows in (slice(0, half_size), slice(samples - half_size, None))]
    models = [reduced_training(training, Reduction()).model.train() for _ in halves]
    for model, half in zip(models, halves, strict=True):
        _forward(model, half, target_key)
    first, second = (getattr(model.get_submodule(state.module), state.name) for model in models)
    module = models[0].get_submodule(state.module)
    if state.name in module._buffers or state.name in module._parameters:
        return not _is_equal(first, second)
    exchanged = deepcopy(models[0])
    setattr(exchanged.get_submodule(state.module), state.name, second)
    return not _is_equal(*(_forward(model, halves[0], target_key) for model in (models[0], exchanged)))


def _rows(batch: Any, rows: slice) -> Any:
    samples = batch_size(batch)

    def take(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.dim() and value.shape[0] == samples else value

    return tree_map(take, batch)


def _forward(model: nn.Module, batch: Any, target_key: str | None) -> Any:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = split_batch(
        tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch), target_key
    )
    torch.manual_seed(_SEED)
    with torch.no_grad():
        return model(*inputs.arguments, **inputs.keywords)


def _is_equal(first: Any, second: Any) -> bool:
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(_is_close(a, b) for a, b in pairs if isinstance(a, Tensor))


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or not first.is_floating_point():
        return first.shape == second.shape and bool(torch.equal(first, second))
    scale = float(first.detach().abs().max()) if first.numel() else 0.0
    return bool(((first - second).abs() <= _TOLERANCE * (scale or 1.0)).all())
