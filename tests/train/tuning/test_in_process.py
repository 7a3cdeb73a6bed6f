"""Timing in the user's process leaves everything as it was, and a rank that fails leaves no other rank waiting."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.compiled import Compilation
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.train.torch_private import forgetting_compiled_code, without_default_group
from meshwright.train.tuning.in_process import measure_in_process
from meshwright.train.tuning.steps import batch_of_size, plan_of_rank
from meshwright.train.tuning.time_limit import LimitReached, time_limit
from meshwright.train.tuning.variants import Variant, fastest_variant
from tests.ranks import RankPool
from tests.train.one_process import world
from tests.train.tuning.timed import BATCH, COMPILED, EAGER, FUSED, Drawing, everything, is_same, make_session, trained

TRACE = torch.compile


@pytest.fixture(autouse=True)
def _quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compilation, "function", lambda self, forward: TRACE(forward, backend="eager"))


def compiled_codes() -> int:
    from torch._dynamo import convert_frame

    return sum(reference() is not None for reference in convert_frame.input_codes.seen)


@pytest.mark.parametrize("plan", [EAGER, FUSED, COMPILED], ids=["eager", "fused", "compiled"])
def test_everything_is_as_it_was(plan: Plan) -> None:
    torch._dynamo.reset()
    model, optimizer = trained(model=Drawing() if plan != COMPILED else None)
    measure = measure_in_process(
        lambda own, alone: make_session(model, optimizer, own, alone), lambda _: [BATCH], world()
    )
    before = everything(model, optimizer)
    (timing,) = measure(plan, 300, True)
    assert timing.failure is None
    assert timing.step_s is not None
    assert len(timing.losses) == 3
    assert is_same(everything(model, optimizer), before)
    assert compiled_codes() == 0


def test_what_changes_would_be_noticed() -> None:
    model, optimizer = trained()
    before = everything(model, optimizer)
    assert is_same(everything(model, optimizer), before)
    model(BATCH[0])
    assert not is_same(everything(model, optimizer), before)


def test_code_that_was_compiled_before_stays_compiled() -> None:
    torch._dynamo.reset()
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    users = TRACE(lambda x: x.sin() + 1, backend=backend)
    users(torch.ones(3))
    model, optimizer = trained()
    known = compiled_codes()
    measure = measure_in_process(
        lambda own, alone: make_session(model, optimizer, own, alone), lambda _: [BATCH], world()
    )
    assert measure(COMPILED, 300, False)[0].failure is None
    users(torch.ones(3))
    assert len(compilations) == 1
    with forgetting_compiled_code():
        pass
    assert compiled_codes() >= known > 0
    torch._dynamo.reset()


def test_a_compiler_that_refuses_the_model_is_a_reason_to_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("cannot lower this")

    monkeypatch.setattr(Compilation, "function", lambda self, forward: TRACE(forward, backend=refuses))
    model, optimizer = trained()
    measure = measure_in_process(
        lambda own, alone: make_session(model, optimizer, own, alone), lambda _: [BATCH], world()
    )
    assert measure(COMPILED, 300, False)[0].failure == "the compiler refuses all of it"


def test_a_variant_whose_loss_differs_is_left_out() -> None:
    model, optimizer = trained()

    def session(own: Plan, alone: World) -> Session:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            value = nn.functional.cross_entropy(output, target)
            return value * 2 if own.compute.fused_optimizer else value

        return make_session(model, optimizer, own, alone, loss=loss)

    lines: list[str] = []
    measure = measure_in_process(session, lambda _: [BATCH], world())
    choice = fastest_variant(EAGER, [Variant(EAGER), Variant(FUSED)], measure, 300, 10, lines.append)
    assert choice.plan == EAGER
    assert len(lines) == 1
    assert lines[0].startswith("eager and fused optimizer is left out: its loss in step 0 is ")


def test_a_model_without_copies_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    model.register_buffer("not_a_leaf", next(model.parameters()) * 2)
    measure = measure_in_process(
        lambda own, alone: make_session(model, optimizer, own, alone), lambda _: [BATCH], world()
    )
    (timing,) = measure(EAGER, 300, False)
    assert timing.step_s is None
    assert "deepcopy" in (timing.failure or "")


# ---- limits


class Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while True:
            x = x + 1


def test_a_variant_beyond_its_limit_is_abandoned() -> None:
    model, optimizer = trained()
    endless = False

    def session(own: Plan, alone: World) -> Session:
        made = make_session(model, optimizer, own, alone)
        if endless:
            made.module.layers = Endless()
        return made

    measure = measure_in_process(session, lambda _: [BATCH], world())
    before = everything(model, optimizer)
    endless = True
    (timing,) = measure(EAGER, 0.5, False)
    assert (timing.step_s, timing.failure) == (None, None)
    assert is_same(everything(model, optimizer), before)
    endless = False
    assert measure(EAGER, 300, False)[0].step_s is not None


def test_an_alarm_of_the_script_is_not_lost() -> None:
    heard: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6)
        signal.setitimer(signal.ITIMER_REAL, 1000, 500)
        with pytest.raises(LimitReached), time_limit(1e-3):
            Endless()(torch.zeros(1))
        left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 0 < left_s <= 1000
        assert interval_s == 500
        with time_limit(1000):
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "the limit's own alarm is off"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# ---- ranks


def failing_step(own: Plan, fails: bool) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        if fails and own.compute.fused_optimizer:
            raise RuntimeError("CUDA out of memory")

    return fail


def choose_on_ranks(rank: int, size: int, failing_rank: int | None) -> tuple[str, list[str], float, bool]:
    """Rank `failing_rank` fails within the step of one variant. Returns the choice, and whether the ranks can still
    exchange something."""
    model, optimizer = trained()
    axes = Axes(replicate=size)
    plans = [plan.model_copy(update={"axes": axes}) for plan in (EAGER, FUSED)]
    were_alone = []

    def session(own: Plan, alone: World) -> Session:
        were_alone.append(not dist.is_initialized())
        made = make_session(model, optimizer, own, alone)
        made.module.register_forward_hook(failing_step(own, rank == failing_rank))
        return made

    lines: list[str] = []
    measure = measure_in_process(session, lambda _: [batch_of_size(BATCH, 2)], world(rank, size))
    choice = fastest_variant(plans[0], [Variant(plan) for plan in plans], measure, 300, 10, lines.append)
    total = torch.ones(1)
    dist.all_reduce(total)
    return choice.plan.to_yaml(), lines, float(total), all(were_alone)


@pytest.mark.parametrize("failing_rank", [None, 1])
def test_all_ranks_take_one_choice_and_none_waits_for_one_that_fails(two: RankPool, failing_rank: int | None) -> None:
    first, second = two.run(choose_on_ranks, failing_rank)
    assert first == second
    plan, lines, total, were_alone = first
    assert total == 2
    assert were_alone, "a collective in a timed step would be an error instead of a hang"
    if failing_rank is not None:
        assert "fused_optimizer: true" not in plan
        assert len(lines) == 1
        assert lines[0].startswith("eager and fused optimizer is left out: CUDA out of memory")
        assert lines[0].endswith("(rank 1)")


def collective_without_group(rank: int, size: int) -> str:
    with without_default_group(), pytest.raises(ValueError) as error:
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    return str(error.value)


def test_without_the_default_group_a_collective_is_an_error(two: RankPool) -> None:
    assert all("not been initialized" in text for text in two.run(collective_without_group))


def test_what_a_rank_computes_alone() -> None:
    groups = {"axes": {"replicate": 2}, "memory": {"accumulation": 2, "recompute": "full"}}
    compute = {"compile": "model", "cuda_graphs": True, "layout": "channels_last"}
    own = plan_of_rank(Plan.model_validate({**groups, "compute": compute}))
    assert own is not None
    assert own.world_size == 1
    assert own.memory.recompute == "full"
    assert own.compute.compile == "model"
    assert not own.compute.cuda_graphs, "with several ranks, compiled code captures graphs of its own"
    assert plan_of_rank(COMPILED) == COMPILED
    for axis in ("shard", "tensor", "pipeline", "context"):
        assert plan_of_rank(Plan.model_validate({"axes": {axis: 2}})) is None


def test_a_batch_of_another_size() -> None:
    bigger, smaller = batch_of_size(BATCH, 6), batch_of_size(BATCH, 2)
    assert torch.equal(bigger[0], torch.cat([BATCH[0], BATCH[0][:2]]))
    assert smaller[1].tolist() == [0, 1]
    assert batch_of_size(BATCH, 4) is BATCH
    detection = [[torch.zeros(3, 4, 4)] * 2, [{"boxes": torch.zeros(1, 4)}] * 2]
    assert [len(entry) for entry in batch_of_size(detection, 5)] == [5, 5]
    assert batch_of_size({"a": torch.zeros(2, 3), "scale": torch.zeros(())}, 3)["a"].shape == (3, 3)
