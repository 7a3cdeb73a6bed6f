"""`mw.prove`: a user's own model, in ranks that are started for it."""

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
from meshwright.proof.samples import Samples
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

def ask():
    net = Net()
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    plan = Plan.model_validate({"axes": {"replicate": 4}})
    return prove(net, batch, loss=loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), plan=plan,
                 global_batch=8, ranks=2, steps=2)
"""


def batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 2, 6, 6, generator=generator), torch.arange(samples) % 4


def ask(model: torch.nn.Module, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "plan": TWO,
        "global_batch": 6,
        "device": "cpu",
        **changed,
    }
    return prove(model, batch(4), **given)


@pytest.mark.soak
def test_a_model_is_proved_and_left_as_it_was(tmp_path: Path) -> None:
    model = Normalized()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    proof = ask(model, output=tmp_path / "proofs")
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
    ("changed", "told"),
    [
        ({"loss": lambda output, target: output.sum()}, r"loss cannot be sent to the ranks .*top level of a module"),
        ({"schedule": lambda optimizer: None}, r"schedule cannot be sent"),
        ({"steps": 0}, "0 steps prove nothing"),
        ({"dtype": "bf16"}, "cannot compare in bf16: choose fp64 or fp32"),
        ({"ranks": 0}, "take at least one"),
    ],
)
def test_what_cannot_be_asked_is_told(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        ask(Plain(), **changed)


def run_script(tmp_path: Path, ending: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "user.py"
    script.write_text(SCRIPT + ending)
    here = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=here)


@pytest.mark.soak
def test_a_script_can_prove_the_model_it_defines(tmp_path: Path) -> None:
    ended = run_script(tmp_path, 'if __name__ == "__main__":\n    p = ask()\n    print(p.equal, p.ranks, p.shrunk)\n')
    assert ended.stdout.startswith("True 2 replicate 4 to replicate 2"), ended.stderr


@pytest.mark.soak
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "print(ask().equal)\n")
    assert ended.returncode != 0
    assert 'put the call below `if __name__ == "__main__":`' in ended.stderr


def test_samples_differ_however_few_the_batch_has() -> None:
    made = Samples({"x": torch.randn(2, 3), "mask": torch.ones(5), "y": torch.tensor([0, 1])}, 6)
    assert len(made) == 6
    samples = [made[index] for index in range(6)]
    assert len({tuple(sample["x"].tolist()) for sample in samples}) == 6
    assert torch.equal(samples[1]["x"], made[1]["x"]), "the same whenever it is asked for"
    together = made.collate(samples[:3])
    assert together["x"].shape == (3, 3)
    assert together["y"].shape == (3,)
    assert together["mask"].shape == (5,), "what a batch has once is not stacked"


def test_a_large_enough_sample_batch_is_taken_as_it_is() -> None:
    x, y = batch(8)
    made = Samples((x, y), 6)
    assert len(made) == 8
    assert all(torch.equal(made[index][0], x[index]) and made[index][1] == y[index] for index in range(8))
