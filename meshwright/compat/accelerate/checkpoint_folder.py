"""The checkpoints of `Accelerator.save_state`: a folder in Meshwright's format (docs/checkpoints.md), which loads under
any plan and number of ranks.

Tensors of all prepared models and optimizers are stored by parameter name, which begins with the number of the model.
Everything else is the object `accelerate` of the index:

    step         batches since the gradients were last combined, as Accelerate counts them
    schedules    the states of the learning-rate schedules
    objects      the states of the objects of `register_for_checkpointing`
    scaler       the state of the loss scale of fp16, otherwise None
    loaders      of each prepared loader the number of passes, and the state of its sampler's generator or None
    generators   the states of the random generators, by rank
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint.load import load, read_manifest_once
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.save import save_at
from meshwright.checkpoint.state import State, model_state, optimizer_state
from meshwright.compat.joined_optimizers import JoinedOptimizers
from meshwright.errors import CheckpointError, InputError
from meshwright.messages.exchange import all_gather_values

FOLDER = "meshwright"  # inside the folder that `save_state` was given
_OBJECT = "accelerate"


def has_checkpoint(folder: Path) -> bool:
    return (folder / FOLDER / MANIFEST).exists()


def save_folder(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh | None,
    contents: Mapping[str, Any],
    number: int,
) -> None:
    """Writes a checkpoint below `folder`. `contents` are the plain values that belong to it. `number` is the number of
    the save. All ranks call this together."""
    joined = _join(models)
    state: State = {
        **model_state(joined),
        **optimizer_state(joined, _join_optimizers(optimizers, joined), {}, (), mesh),
        "schedule": None,  # schedules are among the contents
        "loss_scale": None,
        _OBJECT: {**contents, "generators": all_gather_values(_generators())},
    }
    save_at(state, folder / FOLDER, number, {"step": number, "position": [0, 0], "seed": 0})


def load_folder(
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh | None,
) -> dict[str, Any]:
    """Loads the weights, the optimizers' states and the random generators of this rank, if the checkpoint has them.
    Returns the other contents. All ranks call this together."""
    path, joined = folder / FOLDER, _join(models)
    optimizer = _join_optimizers(optimizers, joined) if optimizers else None
    objects = load(path, read_manifest_once(path), joined, optimizer, {}, (), mesh)
    contents = objects.get(_OBJECT)
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: this checkpoint was not saved by Accelerator.save_state")
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = contents["generators"]
    if rank < len(states):  # a run on more ranks than before keeps its own
        _restore_generators(states[rank])
    return contents


def loader_state(loader: Any) -> dict[str, Any]:
    """The number of passes over a prepared loader, and the state of the generator with which its sampler shuffles. The
    latter is None if it has no generator of its own."""
    generator = getattr(loader, "synchronized_generator", None)
    return {"passes": loader.iteration, "generator": None if generator is None else generator.get_state()}


def restore_loaders(loaders: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Lets loaders shuffle as those that were saved. Does nothing if the script has prepared another number of them."""
    if len(loaders) != len(states):
        return
    for loader, state in zip(loaders, states, strict=True):
        loader.iteration = state["passes"]
        generator = getattr(loader, "synchronized_generator", None)
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"])


def _join(models: Sequence[nn.Module]) -> nn.Module:
    return nn.ModuleDict({str(number): model for number, model in enumerate(models)})


def _join_optimizers(optimizers: Sequence[torch.optim.Optimizer], models: nn.Module) -> JoinedOptimizers:
    joined, names = JoinedOptimizers(optimizers), {id(parameter) for parameter in models.parameters()}
    if any(id(parameter) not in names for group in joined.param_groups for parameter in group["params"]):
        raise InputError(
            "an optimizer trains a parameter of no prepared model, so its state cannot be stored by name: prepare the"
            " module that has the parameter, too"
        )
    return joined


def _generators() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _restore_generators(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
