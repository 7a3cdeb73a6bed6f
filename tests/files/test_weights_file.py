"""Files and folders of weights: tensors are read whole and in parts, and damaged folders are refused in one line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.files.weights_file import has_weights, open_weights

STATE = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.arange(3, dtype=torch.bfloat16)}
STATE |= {"count": torch.tensor(7)}


def write(folder: Path, state: dict[str, Tensor], kind: str) -> None:
    """Writes one file, or with `kind` ending in `index` one file for each tensor and an index."""
    suffix, _, index = kind.partition(" ")
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    parts = {f"{stem}.{suffix}": list(state)}
    if index:
        parts = {f"{stem}-{number}.{suffix}": [name] for number, name in enumerate(state)}
        weight_map = {name: file for file, names in parts.items() for name in names}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, names in parts.items():
        part = {name: state[name] for name in names}
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)


@pytest.mark.parametrize("kind", ["safetensors", "safetensors index", "bin", "bin index"])
def test_tensors_of_a_folder_are_read_whole_and_in_parts(tmp_path: Path, kind: str) -> None:
    assert not has_weights(tmp_path)
    write(tmp_path, STATE, kind)
    assert has_weights(tmp_path)
    files = open_weights(tmp_path)
    assert files.shapes == {name: tuple(value.shape) for name, value in STATE.items()}
    for name, value in STATE.items():
        assert torch.equal(files.read(name), value)
        assert files.read(name).dtype == value.dtype
    assert torch.equal(files.read_region("a.weight", (1, 2), (2, 2)), STATE["a.weight"][1:3, 2:4])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([], "has no weight_map"),
        ({"weight_map": {"a": 3}}, "has no weight_map"),
        (
            {"weight_map": {"a": "../model-1.safetensors"}},
            "names '../model-1.safetensors', which is no file next to it",
        ),
        ({"weight_map": {"a": "model-1.safetensors"}}, "there is no file"),
        ({"weight_map": {"a": 300 * "m"}}, "which is no file next to it"),
        ({"weight_map": {"a": "\ud800"}}, "there is no file"),
        ({"weight_map": {"b": "model-0.safetensors"}}, "has no b, but model.safetensors.index.json names it there"),
        (None, "has neither model.safetensors, "),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, index: Any, message: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model-0.safetensors")
    if index is not None:
        text = index if isinstance(index, str) else json.dumps(index)
        (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError) as refusal:
        open_weights(tmp_path)
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("train.weights: ")
    assert "\n" not in str(refusal.value)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path, STATE, "safetensors")
    os.mkfifo(tmp_path / "config.json")
    assert set(open_weights(tmp_path).shapes) == set(STATE)


@pytest.mark.parametrize(("quantization", "method"), [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"bits": 4}, "")])
def test_a_folder_of_quantized_weights_is_refused(tmp_path: Path, quantization: dict[str, Any], method: str) -> None:
    write(tmp_path, STATE, "safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": None}))
    assert open_weights(tmp_path).shapes
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(InputError, match=r"are quantized \(.*\), and quantized weights are not read: name") as caught:
        open_weights(tmp_path)
    assert method in str(caught.value)
    assert "\n" not in str(caught.value)
