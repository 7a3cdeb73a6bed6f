"""Timing on a GPU: variants with CUDA graphs and compiled code, and a process that is as it was afterwards."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.tuning import in_process
from meshwright.train.tuning.in_process import measure_in_process
from meshwright.train.tuning.variants import Timing, Variant, fastest_variant
from tests.train.tuning.timed import BATCH, COMPILED, EAGER, FUSED, Net, everything, is_same, make_session, trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GRAPHS = Plan.model_validate({"compute": {"cuda_graphs": True}})
BOTH = Plan.model_validate({"compute": {"compile": "model", "cuda_graphs": True}})


def on_gpu() -> World:
    return World(0, 0, 1, 1, 0, torch.device("cuda", 0), None)


def allocated() -> int:
    """The bytes of tensors, without the workspaces that libraries keep for a stream from their first use on."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    "plan", [EAGER, FUSED, GRAPHS, COMPILED, BOTH], ids=["eager", "fused", "graphs", "compiled", "both"]
)
def test_everything_is_as_it_was(plan: Plan) -> None:
    model, optimizer = trained("cuda")
    measure = measure_in_process(
        lambda own, alone: make_session(model, optimizer, own, alone), lambda _: [BATCH], on_gpu()
    )
    measure(EAGER, 300, False)  # libraries keep workspaces from their first use on
    before, memory = everything(model, optimizer), allocated()
    (timing,) = measure(plan, 300, True)
    assert timing.failure is None
    assert timing.step_s
    if plan.compute.cuda_graphs:
        assert timing.uncaptured_s
        assert timing.replayed is not None
        assert timing.replayed[0] == pytest.approx(timing.replayed[1], rel=1e-5)
    assert is_same(everything(model, optimizer), before)
    assert allocated() == memory
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(3, device="cuda"))


class Stubborn(Net):
    """Cannot be captured: it reads a value on the host."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output * 1.0 if float(output.detach().sum()) > -1e9 else output


def test_a_capture_that_fails_leaves_the_generators_usable() -> None:
    model, optimizer = trained("cuda", Stubborn())
    measure = measure_in_process(
        lambda own, alone: make_session(model, optimizer, own, alone), lambda _: [BATCH], on_gpu()
    )
    before = everything(model, optimizer)
    (timing,) = measure(GRAPHS, 300, False)
    assert timing.uncaptured_s
    assert timing.step_s is None
    assert "cannot be captured in" in str(timing.failure)
    assert is_same(everything(model, optimizer), before)
    assert measure(EAGER, 300, False)[0].failure is None
    torch.rand(3, device="cuda")


def test_a_variant_that_runs_out_of_memory_is_left_out_and_its_memory_is_free() -> None:
    model, optimizer = trained("cuda")

    def session(own: Plan, alone: Any) -> Any:
        made = make_session(model, optimizer, own, alone)
        if own.compute.fused_optimizer:
            made.module.register_forward_hook(lambda *_: torch.empty(2**45, dtype=torch.uint8, device="cuda"))
        return made

    lines: list[str] = []
    measure = measure_in_process(session, lambda _: [BATCH], on_gpu())
    measure(EAGER, 300, False)
    memory = allocated()
    choice = fastest_variant(EAGER, [Variant(EAGER), Variant(FUSED)], measure, 300, 10, lines.append)
    assert choice.plan == EAGER
    assert len(lines) == 1
    assert allocated() == memory


def test_a_backward_pass_beyond_its_limit_is_abandoned() -> None:
    """A thread of the device would run it otherwise, in which no signal is heard. It may be compiling then."""
    in_backward: list[bool] = []

    class Endless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            in_backward.append(True)
            while True:
                pass

    model, optimizer = trained("cuda")

    def session(own: Plan, alone: Any) -> Any:
        made = make_session(model, optimizer, own, alone)
        made.module.register_forward_hook(lambda _, __, output: Endless.apply(output))
        return made

    (timing,) = measure_in_process(session, lambda _: [BATCH], on_gpu())(EAGER, 2.0, False)
    assert in_backward
    assert (timing.step_s, timing.failure) == (None, None)
    assert nn.functional.cross_entropy(model(BATCH[0].cuda()), BATCH[1].cuda()).backward() is None


def test_best_plan_takes_a_measured_variant_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timings: list[tuple[Plan, Timing]] = []
    time_here = in_process._time_here

    def noted(plan: Plan, *arguments: Any) -> Timing:
        timings.append((plan, time_here(plan, *arguments)))
        return timings[-1][1]

    monkeypatch.setattr(in_process, "_time_here", noted)
    model, optimizer = trained("cuda")
    before = everything(model, optimizer)
    options: dict[str, Any] = {"loss": nn.functional.cross_entropy, "optimizer": optimizer, "global_batch": 64}
    plan = mw.best_plan(model, BATCH, tune=300, **options)
    assert is_same(everything(model, optimizer), before)
    assert [timing.failure for _, timing in timings] == [None] * len(timings)
    assert {plan.compute.compile for plan, _ in timings} >= {"none", "model"}
    assert all(plan.compute.cuda_graphs and timing.uncaptured_s for plan, timing in timings)
    alike = [plan.compute.model_copy(update={"cuda_graphs": False}) for plan, _ in timings]
    assert not [one for number, one in enumerate(alike) if one in alike[:number]], (
        "what is compiled alike is timed together"
    )
    assert "measured " in capsys.readouterr().err
    count = len(timings)
    assert mw.best_plan(model, BATCH, tune=300, **options) == plan
    assert len(timings) == count
    session = mw.parallelize(model, optimizer, loss=nn.functional.cross_entropy, plan=plan, sample_batch=BATCH)
    for _ in range(6):
        assert torch.isfinite(session.step(BATCH))


def test_compiled_code_of_several_ranks_captures_graphs_of_its_own() -> None:
    """Each of two ranks has such code; here it is timed on one."""
    model, optimizer = trained("cuda")
    plan = BOTH.model_copy(update={"axes": BOTH.axes.model_copy(update={"replicate": 2})})
    measure = measure_in_process(
        lambda own, alone: make_session(model, optimizer, own, alone), lambda _: [BATCH], on_gpu()
    )
    before = everything(model, optimizer)
    (timing,) = measure(plan, 300, False)
    assert timing.failure is None
    assert timing.step_s
    assert is_same(everything(model, optimizer), before)
