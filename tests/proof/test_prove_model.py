"""`mw.prove`: a user's model, in ranks that are started for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.prove_model import prove
from meshwright.proof.sample_dataset import SampleDataset
from tests.proof.cases import Normalized, Plain

TWO = Plan.model_validate({"axes": {"replicate": 2}})

SCRIPT = """
import torch, torch.nn as nn, torch.nn.functional as F
from meshwright.plan import Plan
from meshwright.proof.prove_model import prove

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
    def forward(self, x):
        return self.layer(x)

def loss(output, target):
    return F.cross_entropy(output, target)

def run_proof():
    net = Net()
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    plan = Plan.model_validate({"axes": {"replicate": 4}})
    return prove(net, batch, loss=loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), plan=plan,
                 global_batch=8, ranks=2, steps=2)
"""


def batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 2, 6, 6, generator=generator), torch.arange(samples) % 4


def prove_model(model: torch.nn.Module, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "plan": TWO,
        "global_batch": 6,
        "device": "cpu",
        **changes,
    }
    return prove(model, batch(4), **options)


@pytest.mark.soak
def test_a_model_is_proved_and_left_as_it_was(tmp_path: Path) -> None:
    model = Normalized()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    proof = prove_model(model, output=tmp_path / "proofs")
    assert proof.equal, proof.first_difference
    assert proof.max_relative_error < 1e-9
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_default_dtype() == torch.float32
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    (saved,) = (tmp_path / "proofs").iterdir()  # and nothing else is left there
    assert saved.name == "normalized-proof-0001.json"
    assert json.loads(saved.read_text()) == proof.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda output, target: output.sum()}, r"loss cannot be sent to the ranks .*top level of a module"),
        ({"schedule": lambda optimizer: None}, r"schedule cannot be sent"),
        ({"steps": 0}, "0 steps prove nothing"),
        ({"dtype": "bf16"}, "cannot compare in bf16: choose fp64 or fp32"),
        ({"ranks": 0}, "take at least one"),
    ],
)
def test_wrong_arguments_are_input_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prove_model(Plain(), **changes)


def run_script(tmp_path: Path, ending: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "user.py"
    script.write_text(SCRIPT + ending)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.soak
def test_a_script_can_prove_the_model_it_defines(tmp_path: Path) -> None:
    main = 'if __name__ == "__main__":\n    proof = run_proof()\n    print(proof.equal, proof.ranks, proof.shrunk)\n'
    result = run_script(tmp_path, main)
    assert result.stdout.startswith("True 2 replicate 4 to replicate 2"), result.stderr


@pytest.mark.soak
def test_a_script_without_a_main_guard_is_told_to_add_one(tmp_path: Path) -> None:
    result = run_script(tmp_path, "print(run_proof().equal)\n")
    assert result.returncode != 0
    assert 'put the call below `if __name__ == "__main__":`' in result.stderr


def test_samples_differ_however_few_the_batch_has() -> None:
    dataset = SampleDataset({"x": torch.randn(2, 3), "mask": torch.ones(5), "y": torch.tensor([0, 1])}, 6)
    assert len(dataset) == 6
    samples = [dataset[index] for index in range(6)]
    assert len({tuple(sample["x"].tolist()) for sample in samples}) == 6
    assert torch.equal(samples[1]["x"], dataset[1]["x"]), "a sample is the same each time it is read"
    batched = dataset.collate(samples[:3])
    assert batched["x"].shape == (3, 3)
    assert batched["y"].shape == (3,)
    assert batched["mask"].shape == (5,), "a tensor without a row per sample is not stacked"


def test_a_large_enough_sample_batch_is_taken_as_it_is() -> None:
    x, y = batch(8)
    dataset = SampleDataset((x, y), 6)
    assert len(dataset) == 8
    assert all(torch.equal(dataset[index][0], x[index]) and dataset[index][1] == y[index] for index in range(8))
