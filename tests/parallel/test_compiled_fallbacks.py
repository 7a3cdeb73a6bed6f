"""Jobs that are hard to compile train as they do uncompiled, with one warning each: changing shapes, models that the
compiler cannot trace, a missing compiler, and losses that differentiate twice."""

import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.parallel.compiler import compiled_graphs, compiling_with
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))


class Branching(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return torch.relu(hidden) if hidden.sum() > 0 else torch.tanh(hidden)


class Printing(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        print(f"{tuple(hidden.shape)}, mean {hidden.detach().mean()}")
        return torch.relu(hidden)


class CallingC(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return torch.relu(hidden) * (1 + zlib.crc32(b"%d" % x.shape[0]) % 2)


class Penalized(Net):
    """Returns its input too, so that the loss can differentiate the output by it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        return super().forward(x), x


def penalty(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    scores, x = output
    (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return F.cross_entropy(scores, target) + gradient.square().mean()


def batches(sizes: list[int], width: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, width, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in sizes
    ]


def train(
    what: str, model: Callable[[], nn.Module], sizes: list[int], loss: Any = F.cross_entropy
) -> tuple[list[float], list[str]]:
    """Returns the losses, and the texts of all warnings except those of deprecated functions that torch uses itself and
    its advice to leave Python 3.13.0."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        session = Session(
            model(),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
            loss=loss,
            plan=Plan.model_validate({"compute": {"compile": what}}),
            world=world(),
        )
        losses = [float(session.step(batch)) for batch in batches(sizes)]
    texts = [str(item.message) for item in raised if not issubclass(item.category, DeprecationWarning)]
    return losses, [text for text in texts if not text.startswith("Guards may run slower on Python 3.13.0")]


CHANGING, SHORT_LAST, EQUAL = [6, 5, 9, 4, 8, 3, 7, 11, 2, 10, 13, 12], [6, 6, 6, 2], [6, 6, 6]


@pytest.mark.parametrize("sizes", [CHANGING, SHORT_LAST])
def test_changing_shapes_are_compiled_for_any_shape(sizes: list[int]) -> None:
    expected, _ = train("none", Net, sizes)
    with compiling_with("eager"):
        losses, texts = train("model", Net, sizes)
        assert 2 <= compiled_graphs() <= 3
    assert losses == pytest.approx(expected, rel=1e-5)
    assert texts == [
        "plan.compute.compile: batches have different shapes, so the model is compiled again for any shape"
    ]


@pytest.mark.parametrize("model", all_but([Branching], [Branching, Printing, CallingC]))
def test_a_model_that_the_compiler_cannot_trace_is_compiled_in_parts(model: Callable[[], nn.Module]) -> None:
    expected, _ = train("none", model, EQUAL)
    with compiling_with("eager"):
        losses, texts = train("model", model, EQUAL)
        assert compiled_graphs() > 0
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(texts) == 1
    assert "the compiler cannot trace all of the model" in texts[0]
    assert "\n" not in texts[0]


def test_a_model_of_one_shape_that_can_be_traced_gives_no_warning() -> None:
    with compiling_with("eager"):
        _, texts = train("model", Net, EQUAL)
        assert compiled_graphs() == 1
    assert texts == []


def test_too_little_memory_for_compiling_a_backward_pass_trains_uncompiled() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def fail(graph: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    expected, _ = train("none", Net, EQUAL)
    with compiling_with(aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail)):
        losses, texts = train("model", Net, EQUAL)
    assert losses == pytest.approx(expected, rel=1e-5)
    (text,) = texts
    assert "compiling failed" in text
    assert "out of memory" in text


def test_a_loss_that_differentiates_twice_trains_uncompiled() -> None:
    expected, _ = train("none", Penalized, EQUAL, penalty)
    with compiling_with("aot_eager"):
        losses, texts = train("model", Penalized, EQUAL, penalty)
    assert losses == pytest.approx(expected, rel=1e-5)
    # The trial of the loss has outputs without a graph, which this loss cannot differentiate.
    assert ["could not be tried" in text for text in texts] == [True, False], texts
    assert "compiling failed" in texts[1]


@pytest.mark.soak
def test_a_compiler_that_fails_is_found_out_by_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._inductor.config as inductor_config

    expected, _ = train("none", Net, EQUAL)
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(inductor_config.cpp, "cxx", (str(broken),))
    monkeypatch.setattr(inductor_config, "force_disable_caches", True)
    with compiling_with(None):
        losses, texts = train("model", Net, EQUAL)
    assert losses == expected
    assert len(texts) == 1, texts
    assert "compiling failed" in texts[0]


def train_without_compiler(rank: int, size: int, missing: list[int]) -> tuple[list[float], list[str], bool]:
    """Returns the losses, the warnings about compiling, and whether anything is compiled. The compiler is missing on
    some ranks."""
    import torch._inductor.config as inductor_config

    torch.manual_seed(0)
    groups = {"axes": {"replicate": size}, "compute": {"compile": "model"}}
    options = {"cpp.cxx": ("no-such-compiler",)} if rank in missing else {}
    with inductor_config.patch(options), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        session = Session(
            Net(),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
            loss=F.cross_entropy,
            plan=Plan.model_validate(groups),
            world=world(rank, size),
        )
        losses = [float(session.step(batch)) for batch in batches([3, 3, 3])]
    texts = [str(item.message) for item in raised if "plan.compute.compile" in str(item.message)]
    return losses, texts, session.parallel.compilation.is_on


@pytest.mark.parametrize(("missing", "where"), [([1], " on rank 1"), ([0, 1], "")])
def test_ranks_without_a_compiler_train_uncompiled_with_one_warning(
    two: RankPool, missing: list[int], where: str
) -> None:
    (losses, texts, compiles), (_, other_texts, other_compiles) = two.run(train_without_compiler, missing)
    assert len(losses) == 3
    assert not compiles
    assert not other_compiles
    assert other_texts == []
    assert texts == [
        f"plan.compute.compile: nothing is compiled, because there is no compiler (no-such-compiler){where}"
    ]
