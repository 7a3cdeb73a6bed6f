"""Lightning's checkpoints as folders in Meshwright's format (docs/checkpoints.md): each rank writes its shards, nothing
is pickled, and a folder loads under any plan and number of ranks.

Tensors of the module and of all its optimizers are stored by parameter name. What else a checkpoint of Lightning has,
such as the progress of its loops and the states of schedules and callbacks, is the object `lightning` of the index.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint.load import load, read_manifest_once
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.save import save_at
from meshwright.checkpoint.state import State, model_state, optimizer_state
from meshwright.compat.joined_optimizers import JoinedOptimizers
from meshwright.errors import CheckpointError

_OBJECT = "lightning"


def is_checkpoint_folder(path: Path) -> bool:
    return (path / MANIFEST).exists()


def refuse_other_folder(path: Path) -> None:
    """Raises a `CheckpointError` if the path is a folder, which is not a checkpoint."""
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder without {MANIFEST}, so it is not a checkpoint: {_advice(path, _checkpoints_in(path))}"
        )


@contextmanager
def naming_other_checkpoints(path: Path) -> Iterator[None]:
    """Adds to the message of a `CheckpointError` which other checkpoints there are."""
    try:
        yield
    except CheckpointError as error:
        others = [name for name in _checkpoints_in(path.parent) if name != path.name]
        raise CheckpointError(f"{error}: {_advice(path.parent, others)}") from error


def _checkpoints_in(folder: Path) -> list[str]:
    """The names of the checkpoints of both formats that a callback of Lightning has saved."""
    return sorted(path.name for path in folder.glob("*.ckpt") if path.is_file() or is_checkpoint_folder(path))


def _advice(folder: Path, names: Sequence[str]) -> str:
    if not names:
        return f"{folder} has none, so give the path of another checkpoint, or train from the beginning"
    return f"give the path of another checkpoint; {folder} has {', '.join(names)}"


def save_folder(
    path: Path,
    module: nn.Module,
    mesh: DeviceMesh | None,
    optimizers: Sequence[torch.optim.Optimizer],
    contents: Mapping[str, Any],
    step: int = 0,
) -> Path:
    """Writes the module, the optimizers and the other `contents` of a checkpoint, which have to be plain values, to the
    folder `path`, and returns it. All ranks call this together."""
    joined = JoinedOptimizers(optimizers)
    state: State = {
        **model_state(module),
        **optimizer_state(module, joined, {}, (), mesh),
        "schedule": None,  # schedules are among the contents
        "loss_scale": None,
        _OBJECT: _with_plain_dicts(dict(contents)),
    }
    return save_at(state, path, step, {"step": step, "position": [0, step], "seed": 0})


def load_folder(
    path: Path, module: nn.Module, mesh: DeviceMesh | None, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Loads the weights of a checkpoint and, if there are optimizers, their states. Returns the other contents. All
    ranks call this together."""
    joined = JoinedOptimizers(optimizers) if optimizers else None
    objects = load(path, read_manifest_once(path), module, joined, {}, (), mesh)
    if not isinstance(objects.get(_OBJECT), dict):
        raise CheckpointError(f"{path}: this checkpoint was not saved by Lightning, so it has no progress of its loops")
    contents: dict[str, Any] = objects[_OBJECT]
    return contents


def _with_plain_dicts(value: Any) -> Any:
    """The value with subclasses of dict, such as Lightning's `AttributeDict`, replaced by dicts."""
    if isinstance(value, dict) and type(value).__module__.startswith("lightning"):
        return {key: _with_plain_dicts(item) for key, item in value.items()}
    if type(value) is dict:
        return {key: _with_plain_dicts(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_plain_dicts(item) for item in value)
    return value
