"""On a GPU: a step that cannot be captured or compiled trains on in the same process as if nothing had been tried, and
steps with random layers, recurrent layers and recomputed blocks are captured."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.train.step import cuda_graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS, SAMPLES, WIDTH = 10, 16, 32
GRAPHS: dict[str, Any] = {"cuda_graphs": True}


class Net(nn.Module):
    """Draws random numbers in every step, and keeps statistics: both show whether a step has run twice."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.middle = middle if middle is not None else nn.Identity()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.dropout(self.norm(self.first(x)))))
        return out


class ReadingOnTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().mean()) > 100 else x


class DrawingOnTheHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random())


class OutOfMemory(nn.Module):
    """Has too little memory while a graph is captured."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 GiB.")
        return x


class TooLargeForAGraph(nn.Module):
    """Asks for more memory than the device has while a graph is captured."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**42, device=x.device)
        return x


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(len(x), 1, device=x.device).bernoulli_(0.5)
        return x + kept * self.layer(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, WIDTH // 4, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.reshape(len(x), 4, 8))[0].flatten(1)


class Recomputing(nn.Module):
    """Recomputes two blocks with dropout by torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class ReplacingBuffer(nn.Module):
    """Puts a new tensor into the place of its buffer in every step."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return x * (1 + 0.01 * self.steps)


def session_of(model: nn.Module, compute: dict[str, Any]) -> Session:
    return Session(
        copy.deepcopy(model),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.05),
        loss=nn.CrossEntropyLoss(),
        plan=Plan.model_validate({"compute": compute}),
        world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
    )


def train(model: nn.Module, compute: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list[str], Session]:
    """Returns the losses, the weights and buffers, our warnings and the session."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 3
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        session = session_of(model, compute)
        losses = [float(session.step((x, y))) for _ in range(STEPS)]
    texts = [str(item.message) for item in raised if "plan.compute" in str(item.message)]
    return losses, {name: value.cpu().clone() for name, value in session.state_dict().items()}, texts, session


def model_of(middle: Callable[[], nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Net(middle() if middle else None)


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """Checks after each test that the process is as it was: streams, random numbers, allocator, autocast."""
    stream = torch.cuda.current_stream()
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(5)
    yield
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(4, device="cuda"), expected), "the generator draws other numbers from its seed"
    F.dropout(torch.ones(8, device="cuda"), 0.5)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):  # of the user's own
        x.add_(torch.rand(4, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert x.sum() > 0


def assert_as_if_nothing_was_tried(model: nn.Module, compute: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Trains with and without what cannot work, and asserts that losses, weights and statistics are the same numbers.
    Returns the warnings."""
    losses, state, texts, session = train(model, compute)
    expected, expected_state, _, _ = train(model, plain)
    assert losses == expected
    for name, value in expected_state.items():
        assert torch.equal(state[name], value), name
    assert session.graphs is None or not session.graphs._captured
    return texts


@pytest.mark.parametrize("middle", [ReadingOnTheHost, DrawingOnTheHost, OutOfMemory, TooLargeForAGraph])
def test_a_step_that_cannot_be_captured_goes_on_without_graphs(middle: type[nn.Module]) -> None:
    (text,) = assert_as_if_nothing_was_tried(model_of(middle), GRAPHS, {})
    assert "cannot be captured" in text
    assert "running without CUDA graphs" in text
    assert "\n" not in text
    if middle is not DrawingOnTheHost:  # it is seen at the end of the step only
        assert f"in middle ({middle.__name__})" in text


def test_a_failed_capture_returns_its_memory() -> None:
    train(model_of(), {})
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        train(model_of(ReadingOnTheHost), GRAPHS)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**22


def test_earlier_graphs_go_on_after_a_failed_capture() -> None:
    generator = torch.Generator().manual_seed(1)
    batch = (torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 3)
    captured, eager = session_of(model_of(), GRAPHS), session_of(model_of(), {})
    ours = [float(captured.step(batch)) for _ in range(6)]
    train(model_of(ReadingOnTheHost), GRAPHS)
    ours += [float(captured.step(batch)) for _ in range(6)]
    assert ours == pytest.approx([float(eager.step(batch)) for _ in range(12)], rel=1e-5)


@pytest.mark.parametrize("middle", [None, StochasticDepth, Recurrent, Recomputing, ReplacingBuffer])
def test_random_recurrent_and_recomputed_layers_are_captured(middle: type[nn.Module] | None) -> None:
    losses, state, texts, session = train(model_of(middle), GRAPHS)
    expected, expected_state, _, _ = train(model_of(middle), {})
    assert texts == []
    assert session.graphs is not None
    assert len(session.graphs._captured) == 1
    if middle is Recurrent:  # the state of cuDNN's dropout is drawn once
        assert losses[0] == pytest.approx(expected[0], rel=1e-4)
        assert all(torch.isfinite(value).all() for value in state.values())
        return
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_script_that_keeps_an_earlier_output_is_captured() -> None:
    """Autograd adds gradients on the stream of the first use of a weight, as long as a result of that use exists."""
    generator = torch.Generator().manual_seed(1)
    batch = (torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 3)
    losses = []
    for keeps in (False, True):
        session = session_of(model_of(), GRAPHS)
        kept = [session.module(batch[0].cuda())] if keeps else []
        losses.append([float(session.step(batch)) for _ in range(2)])
        kept += [session.module(batch[0].cuda())] if keeps else []
        losses[-1] += [float(session.step(batch)) for _ in range(5)]
        assert session.graphs is not None
        assert session.graphs.failure is None
        assert len(session.graphs._captured) == 1
        assert len(kept) == 2 * keeps
    assert all(torch.isfinite(torch.tensor(losses[1])))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_blocks_that_a_plan_recomputes_are_captured(recompute: str) -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh()) for _ in range(3)))
    model, results = nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 3)), []
    generator = torch.Generator().manual_seed(1)
    batch = (torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 3)
    for compute in ({}, GRAPHS):
        session = Session(
            copy.deepcopy(model),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.05),
            loss=nn.CrossEntropyLoss(),
            plan=Plan.model_validate({"compute": compute, "memory": {"recompute": recompute}}),
            world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
        )
        results.append([float(session.step(batch)) for _ in range(STEPS)])
    assert session.graphs is not None
    assert len(session.graphs._captured) == 1
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_what_the_compiler_refuses_trains_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The second of the errors: too little memory only while it is compiled."""
    compile_function = torch.compile

    def fail(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        raise error

    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_function(function, backend=fail))
    torch._dynamo.reset()
    (text,) = assert_as_if_nothing_was_tried(model_of(), {"compile": "model"}, {})
    assert "compiling failed" in text
    assert "running without" in text


def test_too_little_memory_while_the_backward_pass_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends.common import aot_autograd

    compile_function = torch.compile

    def fail(graph: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail)
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_function(function, backend=backend))
    torch._dynamo.reset()
    (text,) = assert_as_if_nothing_was_tried(model_of(), {"compile": "model"}, {})
    assert "compiling failed" in text


def test_a_compiled_step_is_captured() -> None:
    torch._dynamo.reset()
    losses, _, texts, session = train(model_of(), {"compile": "model", "cuda_graphs": True})
    assert texts == []
    assert session.graphs is not None
    assert len(session.graphs._captured) == 1
    assert losses[0] == pytest.approx(train(model_of(), {"compile": "model"})[0][0], rel=1e-4)


class OtherWhileCapturing(nn.Module):
    """Takes another path while a graph is captured, as models of transformers do: it would be compiled then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.compiled = torch.compile(self.layer.forward)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.compiled(x) if torch.cuda.is_current_stream_capturing() else self.layer(x)
        return out


def test_nothing_is_compiled_during_a_capture() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    session = session_of(model, GRAPHS)
    session.module.middle = OtherWhileCapturing().cuda()
    x, y = torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % 3
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="plan.compute")  # torch has warnings of its own
        for _ in range(STEPS):
            session.step((x, y))
    assert session.graphs is not None
    assert len(session.graphs._captured) == 1
    assert cuda_graphs.is_refused_compilation(RuntimeError("stance is 'fail_on_recompile'"))
