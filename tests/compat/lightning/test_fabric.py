"""Loops of Lightning's Fabric with our strategy: weights as with Fabric's own DDP, and checkpoints of both formats."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from meshwright.errors import InputError
from tests.compat.lightning.modules import GLOBAL_BATCH, largest_difference, network, plain, samples
from tests.compat.lightning.trainers import PoolEnvironment
from tests.ranks import RankPool
from tests.soaked import all_but

PLANS = [{"axes": {"replicate": 2}}, {"axes": {"shard": 2}}]


def make_fabric(rank: int, size: int, plan: Any, **options: Any) -> Fabric:
    from meshwright.compat.lightning import MeshwrightFabricStrategy

    strategy: Any = "ddp" if plan == "ddp" else MeshwrightFabricStrategy(plan=plan, **options)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, plugins=[PoolEnvironment(rank, size)])
    fabric.launch()
    return fabric


def whole_weights(fabric: Fabric, *modules: Any) -> dict[str, Tensor]:
    states = [fabric.strategy.get_module_state_dict(module._forward_module) for module in modules]
    return plain({f"{number}.{name}": value for number, state in enumerate(states) for name, value in state.items()})


def train_regression(
    rank: int,
    size: int,
    plan: Any,
    epochs: int = 3,
    loads: str | None = None,
    saves: str | None = None,
    checkpoint_format: str = "lightning",
) -> dict[str, Tensor]:
    """A loop with clipping, accumulation, a schedule and a checkpoint."""
    fabric = make_fabric(rank, size, plan, **({} if plan == "ddp" else {"checkpoint_format": checkpoint_format}))
    torch.manual_seed(rank)  # the ranks have different weights, until `setup` gives all of them those of rank 0
    module = network(6)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer = fabric.setup(module, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=GLOBAL_BATCH // size))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
    if loads:
        fabric.load(loads, state)
    for epoch in range(state["epoch"], epochs):
        model.train()
        for index, (inputs, targets) in enumerate(loader):
            accumulates = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(F.mse_loss(model(inputs), targets) / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            model(samples().tensors[0])
        state["epoch"] = epoch + 1
    if saves:
        fabric.save(saves, state)
    return whole_weights(fabric, model)


def train_gan(rank: int, size: int, plan: Any) -> dict[str, Tensor]:
    """A loop with two modules, two optimizers, and two backward passes before a step."""
    fabric = make_fabric(rank, size, plan)
    torch.manual_seed(3)
    modules = network(6, 6), network(6)
    generator, of_generator = fabric.setup(modules[0], torch.optim.Adam(modules[0].parameters(), lr=0.01))
    critic, of_critic = fabric.setup(modules[1], torch.optim.SGD(modules[1].parameters(), lr=0.05, momentum=0.9))
    for noise, _ in fabric.setup_dataloaders(DataLoader(samples(), batch_size=GLOBAL_BATCH // size)):
        critic.zero_grad()
        fake = generator(noise)
        fabric.backward(F.softplus(-critic(noise.roll(1, dims=1) * 2)).mean())
        fabric.backward(F.softplus(critic(fake.detach())).mean())
        of_critic.step()
        generator.zero_grad()
        fabric.backward(F.softplus(-critic(fake)).mean())
        of_generator.step()
    return whole_weights(fabric, generator, critic)


@pytest.mark.parametrize("loop", [train_regression, train_gan])
def test_loops_train_the_weights_of_ddp(loop: Any, two: RankPool) -> None:
    expected = two.run(loop, "ddp")
    for plan in PLANS:
        weights = two.run(loop, plan)
        assert largest_difference(weights[0], weights[1]) == 0
        assert largest_difference(expected[0], weights[0]) < 1e-9


@pytest.mark.parametrize("checkpoint_format", all_but({"lightning"}, ["lightning", "meshwright"]))
def test_a_checkpoint_continues_under_another_plan(checkpoint_format: str, two: RankPool, tmp_path: Path) -> None:
    expected = two.run(train_regression, "ddp")[0]
    for number, (first, second) in enumerate([PLANS, PLANS[::-1]]):
        path = str(tmp_path / f"{number}.ckpt")
        two.run(train_regression, first, 2, None, path, checkpoint_format)
        weights = two.run(train_regression, second, 3, path, None, checkpoint_format)[0]
        assert largest_difference(expected, weights) < 1e-9


def save_and_load_state_dict(rank: int, size: int, path: str) -> tuple[float, bool]:
    """Saves what `model.state_dict()` returns, and loads it with torch alone and with `model.load_state_dict`."""
    fabric = make_fabric(rank, size, {"axes": {"shard": 2}})
    torch.manual_seed(5)
    module = network(6)
    expected = plain(module.state_dict())
    model = fabric.setup_module(module)
    fabric.save(path, {"weights": model.state_dict()})
    saved = torch.load(path)["weights"]
    is_whole = all(torch.equal(saved[name], value) for name, value in expected.items())
    model.load_state_dict({name: value + 1 for name, value in saved.items()})
    loaded = {name.removeprefix("0."): value - 1 for name, value in whole_weights(fabric, model).items()}
    return largest_difference(expected, loaded), is_whole


def late_optimizer(rank: int, size: int) -> str:
    fabric = make_fabric(rank, size, {"axes": {"shard": 2}})
    module = network(6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fabric.setup_module(module)
    with pytest.raises(InputError) as error:
        fabric.setup_optimizers(optimizer)
    return str(error.value)


def test_state_dicts_of_shards_are_saved_and_loaded_whole(two: RankPool, tmp_path: Path) -> None:
    for difference, is_whole in two.run(save_and_load_state_dict, str(tmp_path / "weights.pt")):
        assert is_whole
        assert difference < 1e-15


def test_an_optimizer_of_other_parameters_is_refused(two: RankPool) -> None:
    assert "fabric.setup(model, optimizer)" in two.run(late_optimizer)[0]


def test_the_name_is_registered() -> None:
    import meshwright.compat.lightning  # noqa: F401

    assert type(Fabric(accelerator="cpu", strategy="meshwright", devices=1).strategy).__name__.startswith("Meshwright")


@pytest.mark.parametrize(
    ("plan", "precision", "reason"),
    [
        ({"axes": {"tensor": 2}}, "32-true", "session(self, plan)"),
        ({"axes": {"context": 2}}, "32-true", "axes.context is 2"),
        ({"axes": {"replicate": 2}, "gradients": {"local_steps": 4}}, "32-true", "local_steps"),
        (None, "bf16-true", "numerics.precision"),
        ({"axes": {"replicate": 1}}, "bf16-mixed", "numerics.precision: bf16"),
        ("auto", "32-true", "best_plan"),
        ("nowhere.yaml", "32-true", "or 'auto'"),
        ({"axes": {"shard": 4}}, "32-true", "devices and num_nodes whose product is 4"),
    ],
)
def test_what_cannot_run_is_refused(plan: Any, precision: Any, reason: str) -> None:
    from meshwright.compat.lightning import MeshwrightFabricStrategy

    def set_up() -> None:
        strategy = MeshwrightFabricStrategy(plan=plan)
        Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
        strategy.setup_module(network(6))

    with pytest.raises(InputError) as error:
        set_up()
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_options_of_ddp_are_refused() -> None:
    from meshwright.compat.lightning import MeshwrightFabricStrategy, MeshwrightStrategy

    strategies: tuple[Any, ...] = (MeshwrightFabricStrategy, MeshwrightStrategy)
    for strategy in strategies:
        with pytest.raises(InputError, match="does not have the option gradient_as_bucket_view: leave it out"):
            strategy(gradient_as_bucket_view=True)
