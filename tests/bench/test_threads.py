"""ThreadedModule of one process train the model that one thread would train."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from meshwright.bench.threads import ThreadedModule, data_parallel
from meshwright.errors import InputError


class Images(nn.Module):
    """Two heads, one of which a loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.hidden = nn.Linear(8 * 6 * 6, 16)
        self.scores, self.depth = nn.Linear(16, 5), nn.Linear(16, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = self.hidden(self.convolution(images).relu().flatten(1)).relu()
        return {"scores": self.scores(x), "depth": self.depth(x)}


@pytest.fixture(autouse=True)
def _fp64() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _gradients(runner: nn.Module, model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    cross_entropy(runner(images)["scores"], targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("threads", "samples"), [(2, 7), (3, 8), (4, 3)])
def test_gradients_are_those_of_the_plain_model(threads: int, samples: int) -> None:
    model, images, targets = Images(), torch.randn(samples, 3, 8, 8), torch.randint(0, 5, (samples,))
    targets[0] = -100  # ignored: the parts' means would weigh the others wrongly
    model.convolution.bias.requires_grad_(False)  # type: ignore[union-attr]
    runner = ThreadedModule(model, threads)
    plain, threaded = (_gradients(one, model, images, targets) for one in (model, runner))
    for name, gradient in plain.items():
        found = threaded[name]
        if gradient is None:
            assert found is None, name
        else:
            assert found is not None
            torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    assert plain["depth.weight"] is None
    assert plain["convolution.bias"] is None


def test_gradients_are_the_same_every_time() -> None:
    model, images, targets = Images(), torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))
    runner = ThreadedModule(model, 4)
    first, *others = (_gradients(runner, model, images, targets)["hidden.weight"] for _ in range(10))
    assert first is not None
    assert all(other is not None and torch.equal(first, other) for other in others)


def test_copies_share_the_parameters_and_evaluate_with_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    runner, batch = ThreadedModule(model, 2), torch.randn(6, 4)
    assert [id(parameter) for parameter in runner.parameters()] == [id(parameter) for parameter in model.parameters()]
    runner(batch)
    runner.eval()
    with torch.no_grad():
        torch.testing.assert_close(runner(batch), model(batch))
        assert not runner(batch).requires_grad


def test_statistics_are_those_of_the_first_part() -> None:
    model, batch = nn.BatchNorm1d(4), torch.randn(6, 4)
    ThreadedModule(model, 2)(batch)
    assert model.running_mean is not None
    torch.testing.assert_close(model.running_mean, 0.1 * batch[:3].mean(0))


def test_two_forward_passes_may_come_before_a_backward_pass() -> None:
    class Scaled(nn.Linear):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("scale", torch.randn(4))

        def forward(self, batch: Tensor) -> Tensor:
            return super().forward(batch) * self.scale

    model, batch = Scaled(), torch.randn(6, 4)
    found = []
    for runner in (model, ThreadedModule(model, 2)):
        model.zero_grad()
        (runner(batch).sum() + runner(batch + 1).square().sum()).backward()
        found.append(model.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_what_a_thread_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        ThreadedModule(nn.Linear(4, 4), 2)(torch.randn(6, 5))


def test_a_model_that_returns_a_number_is_refused() -> None:
    class Own(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            return super().forward(batch).mean()

    with pytest.raises(InputError, match="returns a number: threads join tensors with a row for each sample"):
        ThreadedModule(Own(4, 4), 2)(torch.randn(6, 4))


def test_on_gpus_it_is_pytorchs_own() -> None:
    assert isinstance(data_parallel(nn.Linear(4, 4), 1, "cuda"), nn.DataParallel)
    assert isinstance(data_parallel(nn.Linear(4, 4), 2, "cpu"), ThreadedModule)
