"""One training step on tensors without memory: which operators it runs on which shapes, which code it reaches, and how
many FLOPs it takes."""

import hashlib
import logging
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.model_io.batch import at_least_fp32, find_model_value, split_batch
from meshwright.profile.fake import FakeRules, batch_size, fake_batch, fake_model, one_sequence_per_row
from meshwright.profile.torch_private import FakeTensorMode
from meshwright.proof.before_training.reduction import (
    Reduction,
    remove_blocks,
    renamed,
    renamed_modules,
    series_of,
    shortened,
)
from meshwright.proof.before_training.stand_in_loss import stand_in_loss
from meshwright.proof.before_training.training import Training
from meshwright.proof.before_training.widths import narrow_widths
from meshwright.proof.torch_private import TorchDispatchMode
from meshwright.train.step.optimizer import rebuild_optimizer
from meshwright.user.code import is_user_file

_PACKAGE = Path(__file__).parents[2]
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
_MODELS_OF_OURS = (_PACKAGE / "workloads", _PACKAGE / "zoo")


@dataclass(frozen=True)
class FakeStep:
    """What a step on fake tensors has shown. `operators` is a digest of its operators with their shapes and numbers,
    `code` the digests of the Python functions that it has called, outside of torch, Python and this package. `flops`
    are those of one sample, forward and backward. `returns_loss` is False if the model has no loss in its output and
    the training has no loss function."""

    operators: str
    code: tuple[str, ...]
    flops: float
    returns_loss: bool


def fake_step_or_none(training: Training, reduction: Reduction) -> FakeStep | None:
    """Makes a step as `fake_step` does; None if the model's code fails on fake tensors, such as code that depends on
    the values of tensors, which are not there."""
    with _failing_quietly():
        try:
            return fake_step(training, reduction)
        except Exception:
            return None


def runs_forward(training: Training, reduction: Reduction) -> bool:
    """Whether a copy of the reduced training computes its loss on fake tensors. This takes a fraction of the time of
    `fake_step`, which also observes the code and the operators."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _failing_quietly():
        try:
            fake, batch = _on_fake_tensors(training, reduction, mode)
            with torch.random.fork_rng(devices=[]), one_sequence_per_row(training.sample_batch), mode, FakeRules():
                _loss(training, fake, batch)
        except Exception:
            return False
    return True


@contextmanager
def _failing_quietly() -> Iterator[None]:
    """Within this context, fake tensors do not print the stack of what fails."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def fake_step(training: Training, reduction: Reduction) -> FakeStep:
    """Makes one step of a copy of the reduced training. Raises whatever the model's code raises on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake, batch = _on_fake_tensors(training, reduction, mode)
    names = renamed_modules(training.model, reduction.removed)
    template_names = {id(p): renamed(name, names) for name, p in training.model.named_parameters()}
    operators, flops = _OperatorDigest(), FlopCounterMode(display=False)
    with _called_code() as code, torch.random.fork_rng(devices=[]), one_sequence_per_row(training.sample_batch), mode:
        with operators, flops, FakeRules():
            loss, returns_loss = _loss(training, fake, batch)
            loss.backward()
        if not type(training.optimizer).__module__.startswith("torch.optim."):
            with suppress(Exception):  # optimizers that read values; their own functions have been called by then
                rebuild_optimizer(training.optimizer, template_names, dict(fake.named_parameters())).step()
    packages = _packages(training)
    digests = tuple(sorted({_code_digest(item) for item in code if _is_of_training(item.co_filename, packages)}))
    samples = batch_size(training.sample_batch)
    return FakeStep(operators.digest(), digests, flops.get_total_flops() / samples, returns_loss)


def _on_fake_tensors(training: Training, reduction: Reduction, mode: FakeTensorMode) -> tuple[nn.Module, Any]:
    """Returns a copy of the reduced model in training mode, and a batch for it, both without memory."""
    model, removed = training.model, reduction.removed
    samples = batch_size(training.sample_batch)
    fake = fake_model(model, mode, removed, samples).train()
    remove_blocks(fake, series_of(model, removed), removed)
    narrow_widths(fake, reduction.widths)
    return fake, fake_batch(shortened(training.sample_batch, reduction.lengths), samples, mode)


def _loss(training: Training, model: nn.Module, batch: Any) -> tuple[Tensor, bool]:
    """Returns the loss of a batch, and whether it is the training's own."""
    inputs = split_batch(batch, training.target_key)
    output = at_least_fp32(model(*inputs.arguments, **inputs.keywords))
    if training.loss is None:
        value = find_model_value(output)
        return (stand_in_loss(output, None), False) if value is None else (value, True)
    result = training.loss(output, inputs.target)
    return (result[0] if isinstance(result, tuple) else result), True


class _OperatorDigest(TorchDispatchMode):
    """Digests every operator that runs, with the shapes and dtypes of its tensors and with its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._hash = hashlib.sha256()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._hash.update(repr((str(func), _described(args), _described(kwargs or {}), _described(result))).encode())
        return result

    def digest(self) -> str:
        return self._hash.hexdigest()


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return tuple((str(key), _described(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    is_plain = isinstance(value, int | float | complex | str | bool | None | torch.dtype)
    return repr(value) if is_plain else str(type(value))


@contextmanager
def _called_code() -> Iterator[set[CodeType]]:
    """Yields a set to which every Python function is added that this thread calls within the context."""
    called: set[CodeType] = set()
    before = sys.getprofile()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def _packages(training: Training) -> frozenset[str]:
    """The names of the packages that the classes of the model, of the loss and of the optimizer come from."""
    objects = (*training.model.modules(), training.loss, training.optimizer)
    kinds = (kind for item in objects for kind in type(item).__mro__)
    names = {kind.__module__.partition(".")[0] for kind in kinds} | {
        str(getattr(training.loss, "__module__", "")).partition(".")[0]
    }
    return frozenset(names - {"torch", "builtins", "meshwright", ""})


@cache
def _is_of_training(file: str, packages: frozenset[str]) -> bool:
    """Whether a file may hold code of the training: the user's own, that of a package from which a part of the training
    comes, or that of a model of this package. Other code, such as what torch calls, does not change with the model."""
    path = Path(file)
    if any(path.is_relative_to(folder) for folder in _MODELS_OF_OURS):
        return True
    installed = next((folder for folder in _INSTALLED if path.is_relative_to(folder)), None)
    if installed is None:
        return is_user_file(file)
    return path.relative_to(installed).parts[0].removesuffix(".py") in packages


def _code_digest(code: CodeType) -> str:
    """Digests what a function does: its instructions, constants and names, not where it stands in its file."""
    digest = hashlib.sha256(code.co_code)
    for names in (code.co_names, code.co_varnames, code.co_freevars, (code.co_qualname,)):
        digest.update(repr(names).encode())
    for constant in code.co_consts:
        nested = isinstance(constant, CodeType)
        digest.update((_code_digest(constant) if nested else _constant_text(constant)).encode())
    return digest.hexdigest()


def _constant_text(constant: Any) -> str:
    # The order of a set's text differs from process to process.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)
