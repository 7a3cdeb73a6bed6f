"""Writes a model of transformers as a folder that `from_pretrained` reads: config.json, the weights in safetensors
files of at most 5 GB with an index, and the tokenizer's files of the folder that the job started from. Of a model of
peft, only its adapters are written (adapters.py)."""

import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.errors import InputError, StorageError
from meshwright.export.adapters import has_adapters, read_adapters, save_adapters
from meshwright.export.program import quiet
from meshwright.files.storage import writing
from meshwright.job import Job
from meshwright.user.call import load
from meshwright.zoo.huggingface import config_file, read_config

_LARGEST_FILE = "5GB"  # as transformers writes it, in decimal units
_CONFIG_BUILDER = "meshwright.zoo.huggingface:build"
# Files that belong to a model besides its config and its weights. None of them is code.
_COPIED = (
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "normalizer.json"),
)


def check_model(model: nn.Module) -> None:
    """Raises an `InputError` if the model is none of transformers' or peft's."""
    if has_adapters(model):
        return
    if "transformers" not in sys.modules or not isinstance(model, load("transformers:PreTrainedModel")):
        raise InputError(
            f"--to huggingface writes models of transformers, and {type(model).__name__} is no PreTrainedModel: use"
            " --to safetensors"
        )


def check_folder(folder: Path) -> None:
    """Raises an `InputError` if `--output` names something that would be lost."""
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--output {folder}: it exists already: remove it, or name a folder that does not exist")


def write_folder(model: Any, job: Job, folder: Path, needed_bytes: int) -> None:
    """Writes the folder, or replaces an earlier one. It is complete, or it does not exist."""
    draft = folder.with_name(f".new-{secrets.token_hex(4)}-{folder.name[-100:]}")
    try:
        with writing(folder, needed_bytes):
            _save(model, job, draft)
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
            draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_folder(model: nn.Module, folder: Path) -> nn.Module:
    """Returns a model of the same class, read from a folder by transformers or peft."""
    if has_adapters(model):
        with quiet():
            return read_adapters(model, folder)
    model_class: Any = type(model)
    try:
        with quiet():
            loaded: Any = model_class.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers checks the config and the names and shapes of weights
        raise InputError(
            f"{folder} is written, but transformers cannot read it: {' '.join(str(error).split())[:300]}"
        ) from error
    loaded.config.use_cache = False  # as in training: the cache of keys and values is for generating text
    result: nn.Module = loaded.eval()
    return result


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _save(model: Any, job: Job, folder: Path) -> None:
    _restore_cache(model, job)
    try:
        with quiet():
            if has_adapters(model):
                save_adapters(model, folder)
            else:
                model.save_pretrained(str(folder), max_shard_size=_LARGEST_FILE)
    except (OSError, StorageError):
        raise
    except Exception as error:  # they check the config and their conversions of weights
        library = "peft" if has_adapters(model) else "transformers"
        raise InputError(f"{library} cannot write this model: {' '.join(str(error).split())[:300]}") from error
    source = _source_folder(job)
    for name in _COPIED if source else ():
        if source and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _restore_cache(model: Any, job: Job) -> None:
    """Sets `use_cache` to the value of the config that the job names. It is off in training."""
    if job.model.call != _CONFIG_BUILDER:
        return
    try:
        uses_cache = getattr(read_config(job.model.arguments["config"]), "use_cache", None)
    except InputError:  # the config was moved since
        return
    if uses_cache is None:
        return
    model.config.use_cache = uses_cache
    if model.can_generate():
        model.generation_config.use_cache = uses_cache


def _source_folder(job: Job) -> Path | None:
    """Returns the folder of the pretrained model: that of `train.weights`, or that of the model's config. None if the
    job names neither, or if it does not exist any more."""
    if job.train.weights and Path(job.train.weights.path).is_dir():
        return Path(job.train.weights.path)
    if job.model.call != _CONFIG_BUILDER:
        return None
    try:
        file = config_file(job.model.arguments["config"])
    except InputError:
        return None
    return file.parent if file else None
