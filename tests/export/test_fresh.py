"""Every format can be read in a process without Meshwright, and computes what the exported model computes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.export.export import export
from meshwright.export.quantize import quantize
from meshwright.export.run import read_run
from meshwright.export.weights import copy_in_bf16
from tests.export.runs import decoder_run

# -I keeps the working folder off the path, but an editable install would still be found: it is blocked explicitly.
READ_EXPORTS = """
import sys
sys.modules["meshwright"] = None
sys.modules["torchao"] = None
import pathlib, torch
from safetensors.torch import load_file
folder = pathlib.Path(sys.argv[1])
tokens = torch.load(folder / "tokens.pt")
results = {}
for file in folder.glob("*.safetensors"):
    results[file.name] = load_file(file)
def run(file):
    with torch.no_grad():
        results[file.name] = torch.export.load(file).module()(tokens)
dynamic = folder / "decoder-int8-dynamic.pt2"
for file in folder.glob("*.pt2"):
    if file != dynamic:
        run(file)
results["read without torchao"] = set(results)
del sys.modules["torchao"]
import torchao
run(dynamic)
torch.save(results, folder / "results.pt")
"""
FORMATS = {
    "safetensors": "decoder.safetensors",
    "bf16": "decoder-bf16.safetensors",
    "int8": "decoder-int8.pt2",
    "int16": "decoder-int16.pt2",
    "program": "decoder.pt2",
}
TOKENS = torch.randint(500, (7, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder_run(tmp_path_factory.mktemp("runs") / "decoder-0001")


@pytest.fixture(scope="module")
def results(run: Path) -> dict[str, Any]:
    """The weights of each safetensors file and the output of each program, as another process reads them, by the name
    of the file; and the names of the files that it read before it could import torchao."""
    folder = run / "export"
    for to, name in FORMATS.items():
        assert export(run, to, limit=0).file == folder / name
    export(run, "int8", dynamic=True, limit=0)
    torch.save(TOKENS, folder / "tokens.pt")
    subprocess.run([sys.executable, "-I", "-c", READ_EXPORTS, str(folder)], cwd="/", check=True)
    results: dict[str, Any] = torch.load(folder / "results.pt")
    return results


@pytest.mark.soak
def test_all_formats_are_read_without_meshwright(run: Path, results: dict[str, Any]) -> None:
    model = read_run(run).model
    for name, expected_model in (("decoder.safetensors", model), ("decoder-bf16.safetensors", copy_in_bf16(model))):
        state = results[name]
        assert isinstance(state, dict)
        assert set(state) == set(model.state_dict()) - {"head.weight"}  # tied: safetensors keeps one of the names
        assert all(torch.equal(state[key], value) for key, value in expected_model.state_dict().items() if key in state)
    with torch.no_grad():
        expected = {
            "decoder.pt2": model(TOKENS),
            "decoder-int8.pt2": quantize(model, "int8")(TOKENS),
            "decoder-int8-dynamic.pt2": quantize(model, "int8", dynamic=True)(TOKENS),
            "decoder-int16.pt2": quantize(model, "int16")(TOKENS),
        }
    for name, output in expected.items():
        torch.testing.assert_close(results[name], output, rtol=1e-6, atol=1e-6)
    assert not torch.equal(expected["decoder-int8.pt2"], expected["decoder.pt2"])


@pytest.mark.soak
def test_programs_with_integer_weights_need_torch_alone(results: dict[str, Any]) -> None:
    assert {"decoder-int8.pt2", "decoder-int16.pt2", "decoder.pt2"} <= results["read without torchao"]


@pytest.mark.soak
def test_integers_stay_integers_in_the_file(run: Path) -> None:
    for to, dtype in (("int8", torch.int8), ("int16", torch.int16)):
        program = torch.export.load(export(run, to, limit=0).file)
        tables = [v for v in (*program.state_dict.values(), *program.constants.values()) if tuple(v.shape) == (500, 32)]
        assert tables
        assert {table.dtype for table in tables} == {dtype}
