"""Reads a checkpoint into a model and an optimizer, under whatever plan they have now."""

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

from meshwright.checkpoint.manifest import Manifest, verify
from meshwright.checkpoint.pieces import LoadPlanner, held
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
from meshwright.parallel.weights.layout import Tied


@dataclass(frozen=True)
class Found:
    """The newest good checkpoint of a run, and what was wrong with newer ones."""

    path: Path | None
    manifest: Manifest | None
    problems: tuple[str, ...]


def newest_good(folder: Path) -> Found:
    """Looks from the newest checkpoint back, until one is whole."""
    problems: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return Found(path, verify(path), tuple(problems))
        except CheckpointError as error:
            problems.append(str(error))
    return Found(None, None, tuple(problems))


def load(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layouts: Layouts | None = None,
    tied: Sequence[Tied] = (),
    mesh: DeviceMesh | None = None,
) -> dict[str, Any]:
    """Fills the model's weights and buffers and, where given, the optimizer's state, in place. Returns the
    small objects that were saved beside them. `layouts`, `tied` and `mesh` say how a plan has divided the model."""
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
    # Tensors were read in place; what is not one (a module's extra state) has to be handed back.
    module.load_state_dict({k.removeprefix("model/"): held(v) for k, v in state.items() if k.startswith("model/")})
    if optimizer is not None:
        restore_optimizer(module, optimizer, state, tied)
    return {key: state[key] for key in objects}
