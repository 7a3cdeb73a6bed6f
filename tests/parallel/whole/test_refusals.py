"""What the compiler refuses trains on as if nothing had been compiled: with the same losses, random numbers and
statistics, also if the error comes from a backward pass, when the forward pass has run."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.parallel.compiler import compiling_with
from tests.train.one_process import world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.layer = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.dropout(self.norm(x)))
        return out


def train(compiled: str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        session = Session(
            Net(),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
            loss=F.cross_entropy,
            plan=Plan.model_validate({"compute": {"compile": compiled}}),
            world=world(),
        )
        losses = [float(session.step((x, y))) for _ in range(3)]
    texts = [str(item.message) for item in raised if "plan.compute" in str(item.message)]
    return losses, session.state_dict(), texts


def refuse(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(("backend", "failures"), [(refuse, 0), ("eager", 1), ("eager", 2)])
def test_what_is_refused_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, backend: str | Callable[..., Any], failures: int
) -> None:
    """With one failure, model and loss are compiled apart; with two, nothing is compiled."""
    expected, expected_state, _ = train("none")
    backward, remaining = Tensor.backward, [RuntimeError("too little memory")] * failures

    def fail_first(loss: Tensor, *args: Any, **options: Any) -> None:
        if remaining:  # as if the backward pass were compiled now
            raise torch._dynamo.exc.BackendCompilerFailed(refuse, remaining.pop(), None)
        backward(loss, *args, **options)

    monkeypatch.setattr(Tensor, "backward", fail_first)
    with compiling_with(backend):
        losses, state, texts = train("model")
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, msg=name)
    assert len(texts) == (0 if failures == 1 else 1), texts
    assert all("compiling failed" in text for text in texts)
