"""A user's loop with its own backward pass: equal to plain PyTorch under replicate, shard and tensor plans."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.loops.models import assert_close, model, pairs, plan_of, shuffled
from tests.train.toy import points

Result = tuple[list[float], dict[str, Tensor]]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def session_for(module: nn.Module, plan: Plan, loss: Any = F.mse_loss, **options: Any) -> Session:
    return mw.parallelize(module, SGD(module.parameters()), loss=loss, plan=plan, device="cpu", **options)


# ---- accumulation, clipping, schedules and hooks


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def plain_accumulation() -> Result:
    module = model(5, 4)
    module.get_parameter("blocks.1.0.weight").register_hook(halve)
    optimizer = SGD(module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for number, (inputs, target) in enumerate(shuffled(pairs(22)), 1):
        loss = F.mse_loss(module(inputs), target)
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return losses, module.state_dict()


def accumulation(rank: int, size: int, plan: Plan, explicit: bool) -> Result:
    """Accumulates over two batches. With `explicit`, the loop computes the loss itself."""
    module = model(5, 4)
    module.get_parameter("blocks.1.0.weight").register_hook(halve)
    session = session_for(module, plan, schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    losses = []
    for number, batch in enumerate(session.prepare(shuffled(pairs(22))), 1):

        def run(batch: Any = batch) -> None:
            inputs, target = batch
            loss = session.mean(F.mse_loss(session(inputs), target)) if explicit else session.forward(batch)
            session.backward(loss / 2)
            losses.append(loss.item())

        if number % 2:
            with session.no_sync():
                run()
        else:
            run()
            session.clip_gradients(0.1)
            session.optimizer.step()
            session.optimizer.zero_grad()
            session.step_schedule()
    assert session.steps == 3
    return losses, session.state_dict()


@pytest.mark.parametrize("explicit", all_but({False}, [False, True]))
@pytest.mark.parametrize(
    "plan",
    [
        plan_of("replicate", 3),
        plan_of("replicate", 3, gradients={"algorithm": "ring"}),
        plan_of("shard", 3),
        plan_of("shard", 3, memory={"sharding": "optimizer"}),
    ],
    ids=lambda plan: plan.summary(),
)
def test_accumulation_clipping_schedules_and_hooks(three: RankPool, plan: Plan, explicit: bool) -> None:
    expected = plain_accumulation()
    for found in three.run(accumulation, plan, explicit):
        assert_close(found[0], expected[0])
        assert_close(found[1], expected[1])


def split_model(rank: int, size: int, axes: dict[str, int]) -> Result:
    module = model(5, 4)
    sample = next(iter(shuffled(pairs())))
    plan = Plan.model_validate(
        {"axes": axes, "modules": {"splits": {f"blocks.{index}.0": {"kind": "column"} for index in range(3)}}}
    )
    session = session_for(module, plan, sample_batch=sample)
    losses = []
    for batch in session.prepare(shuffled(pairs())):
        loss = session.forward(batch)
        session.backward(loss)
        session.optimizer.step()
        session.optimizer.zero_grad()
        losses.append(loss.item())
    return losses, session.state_dict()


def plain_steps() -> Result:
    module = model(5, 4)
    optimizer = SGD(module.parameters())
    losses = []
    for inputs, target in shuffled(pairs()):
        loss = F.mse_loss(module(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, module.state_dict()


def test_a_split_model(two: RankPool) -> None:
    for found in two.run(split_model, {"tensor": 2}):
        assert_close(found[0], plain_steps()[0])
        assert_close(found[1], plain_steps()[1])


# ---- losses that are not means over samples


def targets(rank: int, size: int, axis: str) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Trains with ignored targets, of which ranks have different numbers, and with a sum. Returns the losses and
    weights of a session, and of plain PyTorch."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, generator=generator, dtype=torch.float64), -100 if i % 3 else i % 4) for i in range(14)]
    functions: list[Any] = [F.cross_entropy, partial(F.cross_entropy, reduction="sum")]
    ours, plain = model(5, 4), model(5, 4)
    found, expected = [], []
    for function in functions:
        session = mw.parallelize(
            ours, torch.optim.SGD(ours.parameters(), lr=0.1), loss=function, plan=plan_of(axis, size), device="cpu"
        )
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for batch in session.prepare(shuffled(data)):  # type: ignore[arg-type]
            session.optimizer.zero_grad()
            loss = session.forward(batch)
            session.backward(loss)
            session.optimizer.step()
            found.append(loss.item())
        for inputs, target in shuffled(data):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = function(plain(inputs), target)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        state = session.state_dict()
        ours = model(5, 4)
        ours.load_state_dict(state)
    return found, expected, ours.state_dict(), plain.state_dict()


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_ignored_targets_and_sums(three: RankPool, axis: str) -> None:
    for found, expected, ours, plain in three.run(targets, axis):
        assert_close(found, expected)
        assert_close(ours, plain)


# ---- several passes


class Routed(nn.Module):
    """Runs one of two branches: a backward pass may belong to forward passes that used different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        out: Tensor = self.norm(self.branches[branch](x))
        return out


def several_passes(rank: int, size: int, axis: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Runs forward and backward passes in different orders. Returns pairs of the session's gradients, and of plain
    PyTorch's on the whole batch."""
    compared = []
    inputs = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = slice(rank * 6 // size, (rank + 1) * 6 // size)
    for order in ("one backward", "two backwards", "one of two"):
        torch.manual_seed(0)
        module = Routed().double()
        plain = Routed().double()
        plain.load_state_dict(module.state_dict())
        plan = plan_of(axis, size, numerics={"batch_norm": "synchronized"})
        session = session_for(module, plan, loss=None)
        passes: list[Any] = [(session.model, session.backward, share), (plain, Tensor.backward, slice(None))]
        for call, backward, rows in passes:
            first, second = (call(inputs[branch][rows], branch).square().mean() for branch in range(2))
            if order == "one backward":
                backward(first + second)
            elif order == "two backwards":
                backward(first)
                backward(second)
            else:
                backward(second)
        gradients = session.full_gradients()
        assert gradients.keys() == {name for name, p in plain.named_parameters() if p.grad is not None}, order
        compared.append((gradients, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}))
    return compared


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_forward_and_backward_passes_in_any_order(two: RankPool, axis: str) -> None:
    for compared in two.run(several_passes, axis):
        for gradients, expected in compared:
            assert_close(gradients, expected)


def steps_and_own_passes(rank: int, size: int, axis: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Alternates `step` with a loop of its own in one session, and compares with `step` alone."""
    states = []
    for alternates in (True, False):
        session = session_for(model(5, 4), plan_of(axis, size))
        batches = session.prepare(shuffled(pairs()))
        for epoch in range(3):
            for batch in batches:
                if not alternates or epoch % 2 == 0:
                    session.step(batch)
                    continue
                session.optimizer.zero_grad()
                session.backward(session.forward(batch))
                session.optimizer.step()
        assert session.steps == 12
        states.append(session.state_dict())
    return states[0], states[1]


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_step_and_own_passes_may_alternate(three: RankPool, axis: str) -> None:
    for alternating, stepped in three.run(steps_and_own_passes, axis):
        assert_close(alternating, stepped)


# ---- random numbers, averages of weights, saving


def test_sessions_leave_the_generators_of_the_loop_alone() -> None:
    def draws(train: bool) -> list[float]:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(20, 5), nn.Dropout())
        session = session_for(module, Plan(), F.cross_entropy)
        values = []
        for batch in torch.utils.data.DataLoader(points(12), batch_size=4, generator=torch.Generator()):
            if train:
                session.step(batch)
                session.forward(batch)
            values.append(float(torch.rand(())))
        return values

    assert draws(True) == draws(False)


def averages(rank: int, size: int, axis: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    session = session_for(model(5, 4), plan_of(axis, size))
    weights = [weight for group in session.optimizer.param_groups for weight in group["params"]]
    average = [weight.detach().clone() for weight in weights]
    for batch in session.prepare(shuffled(pairs())):
        session.optimizer.zero_grad()
        session.backward(session.forward(batch))
        session.optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average, weights, strict=True):
                mean.lerp_(weight, 0.1)
    session.evaluate(pairs())
    with torch.no_grad():
        for mean, weight in zip(average, weights, strict=True):
            weight.copy_(mean)
    loss = session.evaluate(pairs(), batch=14)
    saved = session.save(folder / "last")
    again = session_for(model(5, 4, seed=4), plan_of(axis, size))
    again.load(saved)
    assert again.evaluate(pairs(), batch=14) == loss
    return session.state_dict(), again.state_dict(), again.steps


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_exponential_averages_of_weights_are_evaluated_and_saved(two: RankPool, tmp_path: Path, axis: str) -> None:
    plain = model(5, 4)
    optimizer = SGD(plain.parameters())
    average = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
    )
    average.update_parameters(plain)
    for inputs, target in shuffled(pairs()):
        optimizer.zero_grad()
        F.mse_loss(plain(inputs), target).backward()
        optimizer.step()
        average.update_parameters(plain)
    for state, loaded, steps in two.run(averages, axis, tmp_path):
        assert_close(state, dict(average.module.state_dict()))
        assert_close(loaded, state)
        assert steps == 4


# ---- refusals


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"memory": {"accumulation": 2}}, r"memory\.accumulation is 2, which session\.step does"),
        ({"numerics": {"precision": "fp16"}}, r"need the loss scale of session\.step"),
    ],
)
def test_plans_that_only_step_can_run_are_refused(groups: dict[str, Any], message: str) -> None:
    session = session_for(model(5, 4), Plan.model_validate(groups))
    batch = next(iter(shuffled(pairs())))
    with pytest.raises(InputError, match=rf"session\.model cannot run under the plan .*{message}"):
        session.forward(batch)
    with torch.no_grad():
        assert session.model(batch[0]).shape == (4, 4)


def refuse_pipeline(rank: int, size: int) -> str:
    module = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    plan = Plan.model_validate({"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2, "cuts": ["1"]}})
    session = session_for(module, plan, sample_batch=(torch.randn(4, 5), torch.randn(4, 5)))
    with pytest.raises(InputError) as error:
        session.forward((torch.randn(4, 5), torch.randn(4, 5)))
    return str(error.value)


def test_pipelines_are_refused_with_the_reason(two: RankPool) -> None:
    for message in two.run(refuse_pipeline):
        assert "a pipeline runs forward and backward passes of microbatches in turns, call session.step" in message


def test_a_mean_needs_a_count_outside_of_a_prepared_loop() -> None:
    session = session_for(model(5, 4), Plan())
    with pytest.raises(InputError, match=r"session\.mean\(value, count\)"):
        session.mean(torch.ones((), dtype=torch.float64))
    assert session.mean(torch.full((), 2.0), 3).item() == 2.0


# ---- hooks that are registered after parallelize


def calls_of_hooks(rank: int, size: int, plan: Plan) -> list[str]:
    module = model(5, 4)
    session = session_for(module, plan)
    calls: list[str] = []
    block = module.get_submodule("blocks.1")
    block.register_forward_hook(lambda *_: calls.append("forward"))
    block.register_full_backward_hook(lambda *_: calls.append("backward"))
    weight = session.module.get_parameter("blocks.1.0.weight")
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    session.step(next(iter(session.prepare(shuffled(pairs(22))))))
    return calls


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_hooks_of_modules_and_accumulated_gradients_run(two: RankPool, axis: str) -> None:
    for calls in two.run(calls_of_hooks, plan_of(axis, 2)):
        assert sorted(calls) == ["accumulated", "backward", "forward"]
