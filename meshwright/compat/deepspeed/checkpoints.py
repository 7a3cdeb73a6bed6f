"""Checkpoints of the engine: a folder for each tag, in Meshwright's format (docs/checkpoints.md), and a file `latest`
with the last tag. They load under any configuration and number of ranks.

Besides weights, optimizer, schedule and loss scale, a checkpoint holds the object `deepspeed` of the index:

    counters       global_steps, micro_steps, global_samples and skipped_steps
    client_state   what the script has given
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.load import load, read_manifest_once
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.compat.deepspeed.settings import DTYPES
from meshwright.compat.deepspeed_config.config import DeepSpeedConfig, Precision
from meshwright.errors import CheckpointError, InputError
from meshwright.files.storage import write_atomically
from meshwright.messages.exchange import broadcast_value
from meshwright.messages.plain_values import NotPlainError, to_text
from meshwright.train.session import Session

_COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
_OBJECT = "deepspeed"
_LATEST = "latest"


class EngineCheckpoints:
    """The methods of the engine that save and load."""

    session: Session
    configuration: DeepSpeedConfig
    global_rank: int
    global_steps: int
    loaded_checkpoint_tag: str | None
    lr_scheduler: Any

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes a checkpoint to the folder `save_dir/tag`. The tag is that of rank 0, and `global_step7` if there is
        none. `client_state` holds plain values and tensors. All ranks call this together."""
        name = str(broadcast_value(None if tag is None else str(tag)) or f"global_step{self.global_steps}")
        if not _is_tag(name):
            raise InputError(f"save_checkpoint: the tag is {name!r}: give a name that a folder can have")
        values = {"counters": {key: getattr(self, key) for key in _COUNTERS}, "client_state": dict(client_state or {})}
        _check_plain(values["client_state"])
        self.session.save(Path(save_dir) / name, not exclude_frozen_parameters, {_OBJECT: values})
        if save_latest and self.global_rank == 0:
            write_atomically(Path(save_dir) / _LATEST, name)
        broadcast_value(None)  # no rank looks for `latest` before it is written
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads the checkpoint of a tag, or that which `latest` names. Returns its folder and the client state; (None,
        None) with a warning if there is neither a tag nor `latest`. All ranks call this together."""
        if not load_module_strict or custom_load_fn is not None:
            raise InputError("load_checkpoint(load_module_strict=False, custom_load_fn=…) is not offered: leave it out")
        name, problem = broadcast_value((str(tag), "") if tag is not None else _read_latest(Path(load_dir)))
        if problem:
            raise CheckpointError(problem)
        if name is None:
            if self.global_rank == 0:
                text = f"meshwright: {Path(load_dir) / _LATEST} does not exist, so nothing was loaded: give a tag"
                warnings.warn(text, stacklevel=2)
            return None, None
        path = Path(load_dir) / name
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such checkpoint{_tags_in(Path(load_dir))}")
        if not (path / MANIFEST).exists() and list(path.glob("*_states.pt")):
            raise CheckpointError(
                f"{path} was written by DeepSpeed itself: convert it there with zero_to_fp32.py, and load the weights"
                " with model.load_state_dict before initialize"
            )
        session, manifest = self.session, read_manifest_once(path)
        session.parallel.reshard()
        loads_optimizer = load_optimizer_states and not load_module_only
        optimizer = session.optimizer if loads_optimizer else None
        objects = load(path, manifest, session.module, optimizer, *session.parallel.weight_division)
        values = objects.get(_OBJECT) or {"counters": {}, "client_state": {}}
        if not load_module_only:
            self._restore(objects, values["counters"], load_lr_scheduler_states, int(manifest.about["step"]))
        self.loaded_checkpoint_tag = str(name)
        return str(path), dict(values["client_state"])

    def _restore(self, objects: Mapping[str, Any], counters: Mapping[str, int], schedule: bool, step: int) -> None:
        session = self.session
        session.steps = step
        if schedule and self.lr_scheduler is not None and objects["schedule"] is not None:
            self.lr_scheduler.load_state_dict(objects["schedule"])
        if session.loss_scale and objects.get("loss_scale"):
            session.loss_scale.load_state_dict(objects["loss_scale"])
        for key, value in counters.items():
            setattr(self, key, value)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The whole weights by their names in the model. All ranks call this together."""
        state = self.session.state_dict()
        if exclude_frozen_parameters:
            frozen = {name for name, weight in self.session.module.named_parameters() if not weight.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return state

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the whole weights with `torch.save`, in bf16 or fp16 if the configuration trains in it. All ranks call
        this together."""
        state = self.module_state_dict(exclude_frozen_parameters)
        if self.global_rank == 0:
            precision = self.configuration.precision
            folder = Path(save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            rounded = {name: _rounded(value, precision) for name, value in state.items()}
            torch.save(rounded, folder / save_filename)
        broadcast_value(None)
        return True

    save_fp16_model = save_16bit_model


def _rounded(value: Any, precision: Precision) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    keeps_dtype = precision == "fp32" or not value.is_floating_point()
    return value.detach().to("cpu", value.dtype if keeps_dtype else DTYPES[precision])


def _read_latest(folder: Path) -> tuple[str | None, str]:
    """Returns the tag that `latest` names, None if there is no such file, and what is wrong with it. It raises nothing,
    because the other ranks wait for what rank 0 has read."""
    file = folder / _LATEST
    try:
        name = file.read_text().strip()
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{file} cannot be read: {error}{_tags_in(folder)}"
    if not _is_tag(name):
        return None, f"{file} contains {name!r:.80}, which is no name of a checkpoint{_tags_in(folder)}"
    return name, ""


def _is_tag(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _tags_in(folder: Path) -> str:
    """The end of an error message: which tags there are."""
    tags = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    return f": give one of the tags {', '.join(tags)}" if tags else f": {folder} has no checkpoints"


def _check_plain(client_state: Mapping[str, Any]) -> None:
    try:
        to_text(dict(client_state))
    except NotPlainError as error:
        raise InputError(f"save_checkpoint(client_state=…): {error}: give plain values and tensors") from None
