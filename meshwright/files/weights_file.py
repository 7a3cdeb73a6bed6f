"""Reads weights for `train.weights`: from a `.safetensors` file, from a file that `torch.save` wrote, or from a folder
as Hugging Face's libraries write it, whose tensors may be spread over several files. Only names and shapes are read at
first; tensors are read one by one, whole or in parts. Nothing in a file is executed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.errors import InputError
from meshwright.files.pt_file import read_pt_file
from meshwright.files.regular_file import open_regular_file
from meshwright.user.code import first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The first of these that a folder has is read. An index names the file of each tensor.
_FILES_OF_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_LARGEST_INDEX_BYTES = 2**28
_LONGEST_FILE_NAME = 255  # bytes; the file systems of Linux and macOS have no longer names


class _TensorFile(Protocol):
    """One file with tensors. `shapes` has their shapes by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, region: tuple[slice, ...]) -> "Tensor": ...


class WeightsFiles:
    """The tensors of a file or a folder. `shapes` has their shapes by name."""

    def __init__(self, path: Path, files: Sequence[_TensorFile]) -> None:
        self.path = path
        self._file_of = {name: file for file in files for name in file.shapes}
        self.shapes = {name: file.shapes[name] for name, file in self._file_of.items()}

    def dtype(self, name: str) -> "torch.dtype":
        """Returns the dtype of a tensor. No element of it is read, unless it is a scalar."""
        nothing = (0,) * len(self.shapes[name])
        return self.read_region(name, nothing, nothing).dtype

    def read(self, name: str) -> "Tensor":
        """Returns a whole tensor on the CPU."""
        return self.read_region(name, (0,) * len(self.shapes[name]), self.shapes[name])

    def read_region(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> "Tensor":
        """Returns a part of a tensor on the CPU: `sizes` elements per dimension, beginning at `offsets`. The rest of
        the tensor is not read."""
        region = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        return self._file_of[name].read(name, region)


def has_weights(folder: Path) -> bool:
    """Whether the folder has a file of weights that `open_weights` reads."""
    return any((folder / name).is_file() for name in _FILES_OF_FOLDER)


def open_weights(path: Path) -> WeightsFiles:
    """Opens a file or folder and reads the names and shapes of its tensors. Raises an `InputError` if there is none, or
    if it cannot be read."""
    if not path.is_dir():
        return WeightsFiles(path, [_open_file(path)])
    found = next((path / name for name in _FILES_OF_FOLDER if (path / name).is_file()), None)
    if found is None:
        raise InputError(
            f"train.weights: the folder {path} has neither {', '.join(_FILES_OF_FOLDER[:-1])} nor"
            f" {_FILES_OF_FOLDER[-1]}: name a folder that save_pretrained wrote, or a file"
        )
    _refuse_quantized(path)
    if found.suffix != ".json":
        return WeightsFiles(path, [_open_file(found)])
    file_names = _read_index(found)
    files = {name: _open_file(path / name) for name in dict.fromkeys(file_names.values())}
    for name, file_name in file_names.items():
        if name not in files[file_name].shapes:
            raise InputError(
                f"train.weights: {path / file_name} has no {name}, but {found.name} names it there: copy the folder"
                " again"
            )
    return WeightsFiles(path, list(files.values()))


def _refuse_quantized(folder: Path) -> None:
    """Raises an `InputError` if the folder's config says that its weights are quantized."""
    try:
        with open_regular_file(folder / "config.json") as file:
            config = json.loads(file.read(_LARGEST_INDEX_BYTES))
    except (OSError, ValueError, RecursionError):  # weights can be read without a config
        return
    quantization = config.get("quantization_config") if isinstance(config, dict) else None
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    raise InputError(
        f"train.weights: the weights in {folder} are quantized ({method or 'quantization_config in config.json'}), and"
        " quantized weights are not read: name the folder of the model before it was quantized"
    )


def _read_index(index: Path) -> dict[str, str]:
    """Returns the name of the file of each tensor. The files are next to the index."""
    try:
        if index.stat().st_size > _LARGEST_INDEX_BYTES:
            raise InputError(f"train.weights: {index} has more than {_LARGEST_INDEX_BYTES:,} bytes")
        content = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"train.weights: {index} cannot be read as JSON: {first_line(error)}") from None
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"train.weights: {index} has no weight_map, which names the file of each tensor")
    for file in names.values():
        if Path(file).name != file or len(file.encode(errors="surrogatepass")) > _LONGEST_FILE_NAME:
            raise InputError(f"train.weights: {index} names '{file[:300]}', which is no file next to it")
    return names


def _open_file(path: Path) -> _TensorFile:
    if not path.is_file():
        raise InputError(f"train.weights: there is no file {path}")
    try:
        return _SafetensorsFile(path) if path.suffix == ".safetensors" else _PtFile(path)
    except InputError:
        raise
    except Exception as error:  # safetensors and damaged pickles raise several classes
        raise InputError(f"train.weights: {path} cannot be read as weights: {first_line(error)}") from None


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(path, framework="pt")
        self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118

    def read(self, name: str, region: tuple[slice, ...]) -> "Tensor":
        tensor: Tensor = self._file.get_slice(name)[region] if region else self._file.get_tensor(name)
        return tensor


class _PtFile:
    """A file that `torch.save` wrote. It is mapped into memory, so that only what is used is loaded."""

    def __init__(self, path: Path) -> None:
        import torch

        loaded = read_pt_file(path)
        for key in ("state_dict", "model"):  # other trainers save the state dict under such a key
            if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
                loaded = loaded[key]
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
        ):
            raise InputError(f"train.weights: {path} holds no mapping of names to tensors")
        self._tensors: dict[str, Tensor] = loaded
        self.shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}

    def read(self, name: str, region: tuple[slice, ...]) -> "Tensor":
        return self._tensors[name][region]
