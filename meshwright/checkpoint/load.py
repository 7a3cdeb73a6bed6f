"""Finds the newest valid checkpoint of a run, and reads one into a model and an optimizer under any plan."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint.agreement import from_first_rank, on_all_ranks
from meshwright.checkpoint.chunks import ChunkedTensor, chunks_of, local_value
from meshwright.checkpoint.frozen import FROZEN, check_frozen
from meshwright.checkpoint.manifest import Manifest, checkpoint_name, checkpoints_in, read_manifest
from meshwright.checkpoint.reader import (
    CheckpointReader,
    Transfer,
    open_checkpoint,
    plan_transfers,
    transfer,
    verify,
)
from meshwright.checkpoint.state import (
    GROUPS,
    Layouts,
    ModelDescription,
    State,
    check_model,
    check_trained,
    find_difference,
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


def find_newest_valid(folder: Path, before: int | None = None) -> NewestCheckpoint:
    """Verifies the checkpoints in a folder, from the newest to the oldest, until one is valid, and returns that one. If
    `before` is not None, only those of earlier steps count."""
    problems: list[str] = []
    for step, path in reversed(checkpoints_in(folder).items()):
        if before is not None and step >= before:
            continue
        try:
            manifest = verify(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if manifest.step == step:
            return NewestCheckpoint(path, manifest, tuple(problems))
        problems.append(f"{path}: it was written as {checkpoint_name(manifest.step)}")
    return NewestCheckpoint(None, None, tuple(problems))


def read_manifest_once(path: Path) -> Manifest:
    """Returns a checkpoint's manifest, which rank 0 reads for all ranks, so that they load the same checkpoint even if
    it is being replaced. All ranks call this together."""
    return Manifest.model_validate(from_first_rank(lambda: read_manifest(path).model_dump()))


def difference(path: Path, manifest: Manifest, model: ModelDescription) -> str | None:
    """Returns one line about in what a verified checkpoint differs from the model, of which this rank has the tensors
    `model`. None if it does not differ in these."""
    with open_checkpoint(path, manifest) as reader:
        problem = find_difference(model, reader.tensors, reader.objects)
    return None if problem is None else f"{path}: {problem}"


def load(
    path: Path,
    manifest: Manifest,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    layouts: Layouts | None = None,
    tied: Sequence[TiedLayout] = (),
    mesh: DeviceMesh | None = None,
) -> dict[str, Any]:
    """Loads the model's weights and buffers in place, and the optimizer's state unless `optimizer` is None. Frozen
    weights that were left out of the checkpoint stay as they are. Returns the small objects that the checkpoint also
    has, such as `schedule`, by key. `layouts`, `tied` and `mesh` describe how a
    plan has divided the model. All ranks call this together.

    Files that differ from `manifest` are refused on all ranks before anything is changed. A rank opens only the files
    that it needs."""
    reshard(module)
    with ExitStack() as stack:
        reader = on_all_ranks(lambda: stack.enter_context(open_checkpoint(path, manifest)))
        check_model(module, reader.tensors, reader.objects, layouts, mesh)
        state: State = model_state(module, layouts)
        check_frozen(state, reader.objects.get(FROZEN))
        if optimizer is not None:
            groups = reader.objects[GROUPS]
            on_all_ranks(lambda: check_trained(module, optimizer, groups, tied))
            state.update(optimizer_template(module, reader.tensors, reader.objects, layouts, tied, optimizer))
        transfers = on_all_ranks(lambda: _plan_transfers(reader, state))
        for part in transfers:
            transfer(reader, part)
        for key, value in state.items():
            if not isinstance(value, ChunkedTensor | Tensor):
                state[key] = reader.objects[key]
        objects = {key: value for key, value in reader.objects.items() if "/" not in key}
    # Tensors were read in place. Other objects, such as a module's extra state, have to be set.
    module.load_state_dict(
        {k.removeprefix("model/"): local_value(v) for k, v in state.items() if k.startswith("model/")}
    )
    if optimizer is not None:
        restore_optimizer(module, optimizer, state, objects[GROUPS], tied)
    return objects


def _plan_transfers(reader: CheckpointReader, state: State) -> list[Transfer]:
    """Returns what has to be copied into the tensors of a state, after opening and verifying every file that has a part
    of it."""
    tensors = {key: value for key, value in state.items() if isinstance(value, ChunkedTensor | Tensor)}
    transfers = [
        part
        for key, value in tensors.items()
        if key in reader.tensors
        for part in plan_transfers(reader, key, chunks_of(value))
    ]
    for name in {part.piece.file for part in transfers}:
        reader.files.open(name)
    return transfers
