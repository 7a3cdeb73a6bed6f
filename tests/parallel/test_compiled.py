"""Compiled blocks keep their names and their results. A model that cannot be compiled runs, with a warning."""

import shutil
import warnings

import pytest
import torch
from torch import nn

from meshwright.parallel.compiled import compile_blocks
from meshwright.plan import Plan
from tests.zoo import ZOO

CPU = torch.device("cpu")
COMPILED = Plan.model_validate({"compute": {"compile": "default"}})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (COMPILED, r"there is no compiler \(g\+\+ or clang\+\+\)"),
        (
            Plan.model_validate({"axes": {"tensor": 2}, "compute": {"compile": "default"}}),
            "layers that are split or cut",
        ),
    ],
)
def test_models_that_cannot_be_compiled_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, message: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = ZOO["gpt"].model()
    with pytest.warns(UserWarning, match=message) as warned:
        compile_blocks(model, plan, CPU)
    assert len(warned) == 1
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_blocks_are_compiled_in_place() -> None:
    model = ZOO["gpt"].model()
    names = set(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compile_blocks(model, COMPILED, CPU)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert set(model.state_dict()) == names


@pytest.mark.soak
def test_compiled_blocks_compute_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 3)))
    x = torch.randn(5, 8)
    expected = model(x)
    compile_blocks(model, COMPILED, CPU)
    torch.testing.assert_close(model(x), expected)
