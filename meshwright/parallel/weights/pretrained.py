"""Loads pretrained weights into a model by name: which tensor of the files belongs to which parameter or buffer.

`match_tensors` compares names and shapes without reading a tensor. For models of Hugging Face's transformers the names
are matched as `from_pretrained` does it: with or without the prefix of the base model, renamed and converted by the
rules of the model's type, and without tensors that the class does not need. A tied weight is in the files under one of
its names.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, did_you_mean
from meshwright.files.weights_file import WeightsFiles
from meshwright.parallel.weights.transformers_files import Conversion, match_files

# Older files of transformers have these buffers, which are computed and not loaded.
_COMPUTED_BUFFERS = r"(rotary_emb\.inv_freq|\bposition_ids)$"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the model that the files have as it is, under the name `name`."""

    files: WeightsFiles
    name: str
    shape: tuple[int, ...]

    def file_dtypes(self) -> set[torch.dtype]:
        """Returns the dtype of the tensor in the files."""
        return {self.files.dtype(self.name)}

    def read_region(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Returns `sizes` elements per dimension, beginning at `offsets`. Nothing else is read."""
        return self.files.read_region(self.name, offsets, sizes)


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the model, called `name` there, that is computed from tensors of the files."""

    files: WeightsFiles
    name: str
    shape: tuple[int, ...]
    conversion: Conversion

    def file_dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes of the tensors in the files that this one is computed from."""
        return {self.files.dtype(name) for name, _ in self.conversion.sources}

    def read_region(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Returns `sizes` elements per dimension, beginning at `offsets`. The whole tensor is computed first."""
        whole = self.conversion.convert(self.files.read)[self.name]
        return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


PretrainedTensor = FileTensor | ConvertedTensor


def match_tensors(
    model: nn.Module, files: WeightsFiles, is_skipped: Callable[[str], bool]
) -> dict[str, PretrainedTensor]:
    """Returns the pretrained value of each parameter and buffer that is loaded, by its name in the model, which may be
    on the meta device. Names for which `is_skipped` is true are ignored in the files and not loaded into the model. All
    other names and shapes have to be the same, otherwise an `InputError` is raised."""
    model_state = model.state_dict(keep_vars=True)
    found = _find_tensors(model, model_state, files, is_skipped)
    first_names = _first_names_of_tied(model_state, found)
    pretrained: dict[str, PretrainedTensor] = {}
    for name, value in model_state.items():
        if is_skipped(name):
            continue
        tensor = found.get(first_names.get(id(value), name))
        if tensor is None:
            if _matches_any(name, getattr(model, "_keys_to_ignore_on_load_missing", None)):
                continue
            raise InputError(
                f"train.weights: {files.path} has no {name}{did_you_mean(name, found)};"
                " name what is to keep its initial values in train.weights.skip"
            )
        _check_shape(name, value, files, tensor)
        _check_dtype(name, value, files, tensor)
        pretrained[name] = tensor
    _check_unknown(model, model_state, files, found)
    return pretrained


def load_pretrained(model: nn.Module, pretrained: Mapping[str, PretrainedTensor]) -> None:
    """Loads whole tensors into the model, converted to its dtypes. `pretrained` is what `match_tensors` returned."""
    state = {name: tensor.read_region((0,) * len(tensor.shape), tensor.shape) for name, tensor in pretrained.items()}
    model.load_state_dict(state, strict=False)


def _find_tensors(
    model: nn.Module, model_state: Mapping[str, Any], files: WeightsFiles, is_skipped: Callable[[str], bool]
) -> dict[str, PretrainedTensor]:
    """Returns the tensors of the files by their names in the model; one that the model does not have, by its name in
    the files."""
    matched = match_files(model, model_state, [name for name in files.shapes if not is_skipped(name)])
    found: dict[str, PretrainedTensor] = {
        name: FileTensor(files, file_name, files.shapes[file_name]) for name, file_name in matched.names.items()
    }
    for conversion in matched.conversions:
        try:  # on the meta device, where only shapes are computed
            converted = conversion.convert(lambda name: torch.empty(files.shapes[name], device="meta"))
        except Exception as error:  # whatever transformers raises about tensors that do not fit each other
            raise InputError(
                f"train.weights: {files.path}: transformers cannot make {conversion.target} of"
                f" {conversion.sources[0][0]} and others: {' '.join(str(error).split())[:300]}"
            ) from None
        for name, value in converted.items():
            found[name] = ConvertedTensor(files, name, tuple(value.shape), conversion)
    return {name: tensor for name, tensor in found.items() if not is_skipped(name)}


def _first_names_of_tied(model_state: Mapping[str, Any], found: Mapping[str, Any]) -> dict[int, str]:
    """By id of each tensor, its first name that the files have. Tensors that the files do not have are left out."""
    first_names: dict[int, str] = {}
    for name, value in model_state.items():
        if name in found and isinstance(value, Tensor):
            first_names.setdefault(id(value), name)
    return first_names


def _check_shape(name: str, value: Any, files: WeightsFiles, tensor: PretrainedTensor) -> None:
    if tensor.shape != tuple(value.shape):
        raise InputError(
            f"train.weights: {name} is {tensor.shape} in {files.path}, but"
            f" {tuple(value.shape)} in the model; name it in train.weights.skip to start it anew"
        )


def _check_dtype(name: str, value: Any, files: WeightsFiles, tensor: PretrainedTensor) -> None:
    """Raises an `InputError` if the numbers in the files are of another kind than the model's: integers for floating
    point numbers are mostly quantized weights, and of complex numbers the imaginary part would be lost."""
    for dtype in tensor.file_dtypes():
        if (dtype.is_floating_point, dtype.is_complex) != (value.dtype.is_floating_point, value.dtype.is_complex):
            raise InputError(
                f"train.weights: {name} is {dtype} in {files.path}, but {value.dtype} in the model; quantized weights"
                " are not read: name files of the same kind of numbers, or name it in train.weights.skip"
            )


def _check_unknown(
    model: nn.Module, model_state: Mapping[str, Any], files: WeightsFiles, found: Mapping[str, PretrainedTensor]
) -> None:
    """Raises an `InputError` if the files have a tensor that the model does not have. Buffers that the model computes
    itself and does not save may be in the files."""
    computed = {name for name, _ in model.named_buffers()}
    for name in found:
        is_ignored = _matches_any(name, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
        if name in model_state or name in computed or is_ignored or re.search(_COMPUTED_BUFFERS, name):
            continue
        raise InputError(
            f"train.weights: {files.path} holds {name}, which the model does not have"
            f"{did_you_mean(name, model_state)}; name it in train.weights.skip to leave it out"
        )


def _matches_any(name: str, patterns: Any) -> bool:
    """Whether one of a class's regular expressions matches the name. `patterns` is None if the class has none."""
    return any(re.search(pattern, name) for pattern in patterns or ())
