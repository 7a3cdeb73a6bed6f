"""Checks a checkpoint of Trainer before a training goes on from it. The libraries that read its files say what is wrong
with their bytes, but neither which file it is, nor what to do."""

import json
import warnings
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from meshwright.errors import CheckpointError


def check_checkpoint(folder: Path) -> None:
    """Raises a `CheckpointError` if a file of the checkpoint is damaged, as far as this is seen without reading all
    tensors. Warns if it has no state of the optimizer."""
    for file in sorted(folder.glob("*")):
        problem = _problem(file)
        if problem is not None:
            raise CheckpointError(f"{file} is damaged ({problem}): {_advice(folder)}")
    if folder.is_dir() and not (folder / OPTIMIZER_NAME).exists():
        warnings.warn(f"{folder} has no {OPTIMIZER_NAME}: the optimizer and the schedule start anew", stacklevel=2)


def _problem(file: Path) -> str | None:
    """What is wrong with a file; None if nothing was seen, and for kinds of files that are not known."""
    if file.suffix == ".json":
        try:
            json.loads(file.read_text())
        except ValueError as error:
            return f"it is not JSON: {error}"
    if file.suffix == ".safetensors":
        try:
            with safe_open(str(file), "pt"):
                pass
        except SafetensorError as error:
            return str(error)
    is_saved_by_torch = file.name in (OPTIMIZER_NAME, SCHEDULER_NAME) or file.suffix == ".pth"
    if is_saved_by_torch and not zipfile.is_zipfile(file):
        return "its end is missing"
    return None


def _advice(folder: Path) -> str:
    others = sorted(path.name for path in folder.parent.glob("checkpoint-*") if path.name != folder.name)
    if not others:
        return f"{folder.parent} has no other checkpoint, so give another folder, or train from the beginning"
    return f"give resume_from_checkpoint another checkpoint; {folder.parent} has {', '.join(others)}"
