"""Loops of Accelerate give the same losses and weights with Meshwright's `Accelerator`, under any plan that they can
run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import RankPool

accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from accelerate.utils import DataLoaderConfiguration  # noqa: E402

from meshwright.compat.accelerate import Accelerator  # noqa: E402
from meshwright.compat.accelerate.plan_argument import check_plan  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from meshwright.plan import Plan  # noqa: E402
from tests.compat.accelerate.loops import accelerate_process, network, samples, train_alone, train_on  # noqa: E402
from tests.soaked import all_but, some_in_core  # noqa: E402

SHARDED: dict[str, Any] = {"axes": {"shard": 2}}
PLANS: list[dict[str, Any] | None] = [
    None,
    SHARDED,
    {"axes": {"shard": 2}, "memory": {"sharding": "optimizer"}},
    {"axes": {"shard": 2}, "memory": {"sharding": "gradients"}},
]


def assert_equal(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-9)
    assert list(one[1]) == list(other[1])
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("accumulation", all_but({2}, [1, 2]))
def test_two_ranks_train_as_one_process_with_the_same_global_batch(
    two: RankPool, plan: dict[str, Any] | None, accumulation: int
) -> None:
    split = {"split_batches": True, "gradient_accumulation_steps": accumulation}
    alone = train_alone(split, 16)
    for result in two.run(train_on, Accelerator, {**split, "plan": plan}, 16):
        assert_equal(result, alone)


@pytest.mark.parametrize("plan", some_in_core(PLANS[:2]))
def test_two_ranks_train_as_under_accelerate_itself(two: RankPool, plan: dict[str, Any] | None) -> None:
    """A loader's batch is that of each process, and schedules make one step for each process."""
    theirs = two.run(train_on, accelerate.Accelerator, {"gradient_accumulation_steps": 2}, 8, 14, True)
    ours = two.run(train_on, Accelerator, {"gradient_accumulation_steps": 2, "plan": plan}, 8, 14, True)
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(
    "loading", [{"even_batches": True}, {"dispatch_batches": True}, {"use_seedable_sampler": True}]
)
def test_loading_options_are_obeyed(two: RankPool, loading: dict[str, Any]) -> None:
    options = {"dataloader_config": DataLoaderConfiguration(**loading)}
    theirs = two.run(train_on, accelerate.Accelerator, options, 10, 10, True)
    for one, other in zip(two.run(train_on, Accelerator, options, 10, 10, True), theirs, strict=True):
        assert_equal(one, other)


def _bf16(rank: int, world_size: int, make: Any, options: dict[str, Any]) -> list[Tensor]:
    with accelerate_process(rank, world_size):
        accelerator = make(**options)
        model = accelerator.prepare(network().float())
        output = model(samples()[:4][0].float())
        accelerator.backward(output.sum())
        return [output.detach(), *(parameter.grad for parameter in model.parameters())]


def test_mixed_precision_is_that_of_accelerate(two: RankPool) -> None:
    theirs = two.run(_bf16, accelerate.Accelerator, {"mixed_precision": "bf16"})
    in_plan = {"plan": {"axes": {"replicate": 2}, "numerics": {"precision": "bf16"}}}
    for options in ({"mixed_precision": "bf16"}, in_plan):
        for one, other in zip(two.run(_bf16, Accelerator, options), theirs, strict=True):
            assert one[0].dtype == torch.float32
            for ours, their in zip(one, other, strict=True):
                torch.testing.assert_close(ours, their)


def _adversarial(rank: int, world_size: int, make: Any) -> list[Tensor]:
    """Two models with an optimizer each, whose losses pass through both."""
    with accelerate_process(rank, world_size):
        accelerator = make()
        generator, discriminator = network(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01)
        optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.9)
        loader: Any = torch.utils.data.DataLoader(samples(48), batch_size=6)
        generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(
            generator, discriminator, optimizer_g, optimizer_d, loader
        )
        for noise, real in loader:
            fake = generator(noise)
            optimizer_d.zero_grad()
            accelerator.backward(discriminator(fake.detach()).mean() - discriminator(real).mean())
            accelerator.clip_grad_value_(discriminator.parameters(), 0.05)
            optimizer_d.step()
            optimizer_g.zero_grad()
            accelerator.backward(-discriminator(fake).mean())
            optimizer_g.step()
        states = (accelerator.get_state_dict(generator), accelerator.get_state_dict(discriminator))
        return [value.clone() for state in states for value in state.values()]


def test_two_models_train_as_under_accelerate_itself(two: RankPool) -> None:
    theirs = two.run(_adversarial, accelerate.Accelerator)
    for one, other in zip(two.run(_adversarial, Accelerator), theirs, strict=True):
        for ours, their in zip(one, other, strict=True):
            torch.testing.assert_close(ours, their, rtol=0, atol=1e-9)


def _plain_backward(rank: int, world_size: int, plan: Any) -> list[Tensor]:
    with accelerate_process(rank, world_size):
        accelerator = Accelerator(plan=plan)
        model = network()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, target = samples()[rank * 8 : rank * 8 + 8]
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
        return list(accelerator.get_state_dict(model).values())


def test_gradients_of_loss_backward_are_combined_at_the_step(two: RankPool) -> None:
    model = network()
    inputs, target = samples()[:16]
    nn.functional.mse_loss(model(inputs), target).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for result in two.run(_plain_backward, None):
        for ours, expected in zip(result, model.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, expected)


def test_loss_backward_of_a_sharded_model_is_refused(two: RankPool) -> None:
    with pytest.raises(Exception, match=r"replace loss.backward\(\) by it"):
        two.run(_plain_backward, SHARDED)


def _other_models_loss(rank: int, world_size: int) -> tuple[int, bool]:
    """Only rank 0 runs a backward pass of a model that is not prepared."""
    with accelerate_process(rank, world_size):
        accelerator = Accelerator()
        model, other = accelerator.prepare(network()), network()
        inputs, target = samples()[rank * 8 : rank * 8 + 8]
        with accelerator.no_sync(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), target))
        before = [parameter.grad.clone() for parameter in model.parameters()]
        if rank == 0:
            accelerator.backward(other(inputs).sum())
        after = [parameter.grad for parameter in model.parameters()]
        return len(after), all(map(torch.equal, before, after))


def test_a_loss_of_another_model_combines_nothing(two: RankPool) -> None:
    assert two.run(_other_models_loss) == [(6, True), (6, True)]


def _module_that_fails(rank: int, world_size: int) -> list[Tensor]:
    """A backward pass that raises an exception leaves nothing behind that changes the next one."""
    with accelerate_process(rank, world_size):
        accelerator = Accelerator()
        model = accelerator.prepare(network())
        inputs, target = samples()[rank * 8 : rank * 8 + 8]

        def fail(gradient: Tensor) -> None:
            raise ValueError("the user's hook")

        handle = accelerator.unwrap_model(model)[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="the user's hook"):
            accelerator.backward(model(inputs).sum())
        handle.remove()
        model.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), target))
        return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_backward_pass_after_one_that_failed(two: RankPool) -> None:
    model = network()
    inputs, target = samples()[:16]
    nn.functional.mse_loss(model(inputs), target).backward()
    for result in two.run(_module_that_fails):
        for ours, parameter in zip(result, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad)


def test_plans_that_loops_of_accelerate_cannot_run_are_refused() -> None:
    with accelerate_process():
        for plan, message in (
            ({"axes": {"tensor": 2}}, "is for 2 ranks, but 1 were started"),
            ({"memory": {"accumulation": 2}}, r"accumulate with Accelerator\(gradient_accumulation_steps=…\)"),
            ({"gradients": {"powersgd_rank": 2}}, "set powersgd_rank to 0"),
        ):
            with pytest.raises(InputError, match=message):
                Accelerator(plan=plan).prepare(network())
    with pytest.raises(InputError, match=r"axes\.context is 2: choose a plan of replicas and shards"):
        check_plan(Plan.model_validate({"axes": {"context": 2}}))
    disagreement = r"mixed_precision is bf16, but the plan says numerics\.precision: tf32"
    with accelerate_process(), pytest.raises(InputError, match=disagreement):
        Accelerator(mixed_precision="bf16", plan={"numerics": {"precision": "tf32"}}).prepare(network())


def test_a_prepared_model_has_the_attributes_and_names_of_the_users_model() -> None:
    with accelerate_process():
        accelerator, model = Accelerator(), network()
        model.greeting = "hello"  # type: ignore[assignment]
        prepared = accelerator.prepare(model)
        assert prepared.greeting == "hello"
        assert accelerator.unwrap_model(prepared) is model
        assert accelerator.prepare(prepared) is prepared
        assert list(prepared.state_dict()) == list(model.state_dict())
        with pytest.raises(AttributeError, match="nothing"):
            _ = prepared.nothing
        accelerator.free_memory()
        assert accelerator._models == []
