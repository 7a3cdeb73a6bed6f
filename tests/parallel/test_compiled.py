"""Compiled blocks keep their names and their results, a whole model is compiled together with its loss, and a model
that cannot be compiled runs, with a warning."""

import shutil
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parallel.compiled import CompiledForward, compile_model
from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.train.one_process import world
from tests.zoo import ZOO

CPU = torch.device("cpu")
COMPILED = Plan.model_validate({"compute": {"compile": "blocks"}})


def compiled_modules(model: nn.Module) -> list[str]:
    """The names of the modules whose forward functions are compiled."""
    return [name for name, module in model.named_modules() if isinstance(module.forward, CompiledForward)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (COMPILED, r"there is no compiler \("),
        (
            Plan.model_validate(
                {"axes": {"tensor": 2}, "memory": {"recompute": "selective"}, "compute": {"compile": "blocks"}}
            ),
            "split layers that are recomputed selectively are not compiled",
        ),
    ],
)
def test_models_that_cannot_be_compiled_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, message: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = ZOO["gpt"].model()
    with pytest.warns(UserWarning, match=message) as warned:
        compilation = compile_model(model, plan, CPU)
    assert len(warned) == 1
    assert not compilation.is_on
    assert compiled_modules(model) == []


def test_blocks_are_compiled_in_place() -> None:
    model = ZOO["gpt"].model()
    names = set(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compile_model(model, COMPILED, CPU)
    assert compiled_modules(model) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert set(model.state_dict()) == names


@pytest.mark.soak
def test_compiled_blocks_compute_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 3)))
    x = torch.randn(5, 8)
    expected = model(x)
    compile_model(model, COMPILED, CPU)
    torch.testing.assert_close(model(x), expected)


# ---- the whole model

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1, 2, 0, -100, 1])


class WithLoss(nn.Module):
    """Computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layer(x), y)}


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + output.square().mean()


def losses(compile: str, model: Callable[[], nn.Module], loss: Any, batch: Any) -> list[float]:
    torch.manual_seed(0)
    session = Session(
        model().double(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
        loss=loss,
        plan=Plan.model_validate({"compute": {"compile": compile}}),
        world=world(),
    )
    return [float(session.step(batch)) for _ in range(3)]


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Callable[..., Any]) -> None:
    """Replaces the backend of `torch.compile`, because the default one takes seconds."""
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compile_function(function, backend=backend))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "loss", "batch"),
    [
        (partial(nn.Linear, 4, 3), F.cross_entropy, (X, Y)),
        (partial(nn.Linear, 4, 3), own_loss, (X, Y)),
        (WithLoss, None, (X, Y)),
    ],
)
def test_a_model_and_its_loss_are_compiled_once_as_one_graph(
    monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], loss: Any, batch: Any
) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        forward: Callable[..., Any] = graph.forward
        return forward

    expected = losses("none", model, loss, batch)
    compile_with(monkeypatch, count)
    assert losses("model", model, loss, batch) == pytest.approx(expected, rel=1e-12)
    assert len(graphs) == 1
    assert "cross_entropy" in str(graphs[0].code)


def test_a_model_whose_compilation_fails_trains_uncompiled_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no kernel for this")

    expected = losses("none", partial(nn.Linear, 4, 3), F.cross_entropy, (X, Y))
    compile_with(monkeypatch, fail)
    with pytest.warns(UserWarning, match="compiling failed .*no kernel for this.*, running without") as warned:
        assert losses("model", partial(nn.Linear, 4, 3), F.cross_entropy, (X, Y)) == expected
    assert len(warned) == 1


def test_an_error_of_the_model_is_raised_as_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, lambda graph, inputs: graph.forward)
    failed = pytest.warns(UserWarning, match="compiling failed")
    with failed, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        losses("model", partial(nn.Linear, 5, 3), F.cross_entropy, (X, Y))
