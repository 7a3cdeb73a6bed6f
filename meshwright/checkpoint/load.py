"""Finds the newest valid checkpoint of a run, and reads one into a model and an optimizer under any plan."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint.chunks import LoadPlanner, local_value
from meshwright.checkpoint.manifest import Manifest, verify
from meshwright.checkpoint.state import (
    Layouts,
    State,
    check_model,
    model_state,
    optimizer_template,
    restore_optimizer,
)
from meshwright.errors import CheckpointError
from meshwright.parallel.shard import reshard
from meshwright.parallel.weights.layout import TiedLayout


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest valid checkpoint of a run, and one message for each newer one that is damaged. `path` and `manifest`
    are None if there is no valid checkpoint."""

    path: Path | None
    manifest: Manifest | None
    problems: tuple[str, ...]


def find_newest_valid(folder: Path) -> NewestCheckpoint:
    """Verifies the checkpoints in a folder, from the newest to the oldest, until one is valid, and returns that one."""
    problems: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return NewestCheckpoint(path, verify(path), tuple(problems))
        except CheckpointError as error:
            problems.append(str(error))
    return NewestCheckpoint(None, None, tuple(problems))


def load(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layouts: Layouts | None = None,
    tied: Sequence[TiedLayout] = (),
    mesh: DeviceMesh | None = None,
) -> dict[str, Any]:
    """Loads the model's weights and buffers in place, and the optimizer's state unless `optimizer` is None. Returns the
    small objects that the checkpoint also has, such as `schedule`, by key. `layouts`, `tied` and `mesh` describe how a
    plan has divided the model."""
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    reshard(module)
    check_model(module, metadata, layouts, mesh)
    objects: State = {key: None for key in metadata.state_dict_metadata if "/" not in key}
    state: State = {**model_state(module, layouts), **objects}
    if optimizer is not None:
        state.update(optimizer_template(module, metadata, layouts, tied))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=not dist.is_initialized())
    # Tensors were read in place. Other objects, such as a module's extra state, have to be set.
    module.load_state_dict(
        {k.removeprefix("model/"): local_value(v) for k, v in state.items() if k.startswith("model/")}
    )
    if optimizer is not None:
        restore_optimizer(module, optimizer, state, tied)
    return {key: state[key] for key in objects}
