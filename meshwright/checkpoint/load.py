"""Finds the newest valid checkpoint of a run, and reads one into a model and an optimizer under any plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint.chunks import ChunkedTensor, chunks_of, local_value
from meshwright.checkpoint.manifest import Manifest, checkpoint_name, read_manifest
from meshwright.checkpoint.reader import fill, open_checkpoint, verify
from meshwright.checkpoint.state import (
    GROUPS,
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
            manifest = verify(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if path.name == checkpoint_name(manifest.step):
            return NewestCheckpoint(path, manifest, tuple(problems))
        problems.append(f"{path}: it was written as {checkpoint_name(manifest.step)}")
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
    reshard(module)
    with open_checkpoint(path, read_manifest(path)) as reader:
        check_model(module, reader.tensors, reader.objects, layouts, mesh)
        state: State = model_state(module, layouts)
        if optimizer is not None:
            state.update(optimizer_template(module, reader.tensors, reader.objects, layouts, tied))
        for key, value in state.items():
            if not isinstance(value, ChunkedTensor | Tensor):
                state[key] = reader.objects[key]
            elif key in reader.tensors:
                fill(reader, key, chunks_of(value))
        objects = {key: value for key, value in reader.objects.items() if "/" not in key}
    # Tensors were read in place. Other objects, such as a module's extra state, have to be set.
    module.load_state_dict(
        {k.removeprefix("model/"): local_value(v) for k, v in state.items() if k.startswith("model/")}
    )
    if optimizer is not None:
        restore_optimizer(module, optimizer, state, objects[GROUPS], tied)
    return objects
