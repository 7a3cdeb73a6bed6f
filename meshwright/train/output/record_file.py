"""Reads a file of a recorded step, which `torch.save` wrote. Nothing of it is executed (files/pt_file.py), and a file
that is damaged, or holds anything else than a recorded step, raises an `InputError` that names it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from meshwright.errors import InputError
from meshwright.files.pt_file import read_pt_file
from meshwright.train.output.observation import RankObservation

Tensors = dict[str, Tensor]

_OBSERVATION = TypeAdapter(RankObservation)
_KEYS = {"gradients", "state", "seen", "gradients_of", "state_of"}


@dataclass(frozen=True)
class RecordedStep:
    """One step of a run: the full gradients and state (weights and buffers) of rank 0, on the CPU, and the observations
    of all ranks. `norm` is None without clipping. `differing_gradients` and `differing_states` hold, by rank and then
    by name, the tensors of other ranks that are not bitwise equal to those of rank 0."""

    loss: Tensor
    norm: Tensor | None
    gradients: Tensors
    state: Tensors
    observations: tuple[RankObservation, ...]
    differing_gradients: Mapping[int, Tensors]
    differing_states: Mapping[int, Tensors]


class _DamagedRecord(Exception):
    """The content of a file is not what `StepRecorder` writes."""


def read_record(file: Path) -> RecordedStep:
    """Returns the recorded step in a file. Raises an `InputError` of one line if the file is missing or damaged."""
    try:
        return _recorded_step(read_pt_file(file))
    except OSError as error:
        raise InputError(f"{file} cannot be read as a recorded step: {error.strerror or error}") from None
    except Exception as error:  # `PtFileError`, `_DamagedRecord`, and what operations on odd values raise
        reason = str(error).partition("\n")[0].removeprefix("it is damaged: ") or type(error).__name__
        raise InputError(f"{file} is damaged, it cannot be read as a recorded step: {reason}") from None


def _recorded_step(content: Any) -> RecordedStep:
    """Returns the content of a file as a recorded step. Raises `_DamagedRecord` if anything in it is of another kind or
    shape than `StepRecorder` writes."""
    if not isinstance(content, dict) or not content.keys() >= _KEYS or not content.keys() <= _KEYS | {"loss", "norm"}:
        raise _DamagedRecord("it has other fields than a recorded step")
    loss, norm = content.get("loss", torch.zeros(())), content.get("norm")
    for name, value in (("loss", loss), ("norm", norm)):
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()) and (
            value is not None or name == "loss"
        ):
            raise _DamagedRecord(f"its {name} is not a number")
    state = _tensors(content["state"], "state")
    gradients = _tensors(content["gradients"], "gradients", state)
    observations = tuple(_observations(content["seen"]))
    return RecordedStep(
        loss=loss.reshape(()),
        norm=norm,
        gradients=gradients,
        state=state,
        observations=observations,
        differing_gradients=_tensors_of_ranks(content["gradients_of"], "gradients", len(observations), state),
        differing_states=_tensors_of_ranks(content["state_of"], "state", len(observations), state),
    )


def _tensors(value: Any, what: str, state: Mapping[str, Tensor] | None = None) -> Tensors:
    """Returns the value if it maps names to tensors. With `state`, tensors must have the shape of the weight or buffer
    of their name."""
    if not isinstance(value, dict):
        raise _DamagedRecord(f"its {what} are no mapping")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise _DamagedRecord(f"its {what} hold something that is no tensor")
        if state is not None and (name not in state or state[name].shape != tensor.shape):
            raise _DamagedRecord(f"its {what} of {name} have the shape {tuple(tensor.shape)}, unlike the weight")
    return value


def _tensors_of_ranks(value: Any, what: str, ranks: int, state: Mapping[str, Tensor]) -> dict[int, Tensors]:
    if not isinstance(value, dict) or not all(type(rank) is int and 0 < rank < ranks for rank in value):
        raise _DamagedRecord(f"its {what} of other ranks are no mapping of ranks below {ranks}")
    return {rank: _tensors(tensors, what, state) for rank, tensors in value.items()}


def _observations(value: Any) -> Iterator[RankObservation]:
    """Yields the observations of ranks 0, 1, and so on."""
    if not isinstance(value, list | tuple) or not value:
        raise _DamagedRecord("it has no observations of ranks")
    names = {field.name for field in fields(RankObservation)}
    for rank, stored in enumerate(value):
        if not isinstance(stored, dict):
            raise _DamagedRecord(f"its observations of rank {rank} are no mapping")
        observed = RankObservation.with_field_names(stored)
        try:
            observation = _OBSERVATION.validate_python(observed)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise _DamagedRecord(f"its observations of rank {rank}: {where}: {problem['msg']}") from None
        if observation.rank != rank or not observed.keys() <= names:
            raise _DamagedRecord(f"its observations of rank {rank} have other fields or another rank")
        yield observation
