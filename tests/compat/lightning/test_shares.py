"""Lightning's Trainer, Fabric and `meshwright train` train on the same global batches if ranks have unequal shares."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset

from meshwright.compat.lightning.shares import SharesOfLoaders, batch_share
from meshwright.errors import InputError
from meshwright.train.output.folder import RunFolder
from tests.compat.lightning.modules import Gan, Regression, WithSession, largest_difference, plain, samples
from tests.compat.lightning.test_fabric import train_regression
from tests.compat.lightning.test_train_command import train_here, weights_of
from tests.compat.lightning.trainers import fit, make_trainer
from tests.ranks import RankPool, ranks

SHARES: dict[str, Any] = {"axes": {"replicate": 2}, "shares": [9, 2]}
EVEN = {"axes": {"replicate": 2}}
SHARDED = {**SHARES, "axes": {"shard": 2}}


class Logging(Regression):
    """Logs the loss of each step and its mean over the epoch, over all ranks."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class Logged(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values += [float(trainer.callback_metrics["loss_step"])] if "loss_step" in trainer.callback_metrics else []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.values += (
            [float(trainer.callback_metrics["loss_epoch"])] if "loss_epoch" in trainer.callback_metrics else []
        )


def train(rank: int, size: int, name: str, plan: Any, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains three epochs of 70 samples, which are shuffled. The last batch has ten."""
    from meshwright.compat.lightning import MeshwrightStrategy

    strategy: Any = "ddp_find_unused_parameters_true"
    if plan != "ddp":
        strategy = MeshwrightStrategy(plan=plan, checkpoint_format="meshwright" if name == "session" else "lightning")
    logged, workers = Logged(), options.pop("workers", 0)
    trainer = make_trainer(rank, size, strategy, folder, max_epochs=3, callbacks=[logged], **options)
    data = Subset(samples(), range(70))
    module: Any = {"gan": Gan, "logging": Logging, "session": WithSession}[name]()
    loader: Any = DataLoader(data, batch_size=12 // size, shuffle=True, num_workers=workers)
    evaluation: Any = DataLoader(data, batch_size=12 // size) if name == "logging" else None
    trainer.fit(module, loader, evaluation)
    validation = float(trainer.callback_metrics.get("validation_loss", 0))
    of_strategy: Any = trainer.strategy
    whole = of_strategy.lightning_module_state_dict if plan == "ddp" else of_strategy.full_state_dict
    return {"weights": plain(whole()), "logged": [*logged.values, validation]}


@pytest.mark.parametrize(
    ("name", "plan", "options"),
    [
        ("logging", SHARES, {}),
        pytest.param("logging", SHARDED, {"accumulate_grad_batches": 2}, marks=pytest.mark.soak),
        pytest.param("logging", SHARES, {"workers": 2}, marks=pytest.mark.soak),
        pytest.param("gan", SHARES, {}, marks=pytest.mark.soak),
        pytest.param("gan", SHARDED, {}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_shares_train_and_log_as_equal_ones(
    name: str, plan: Any, options: dict[str, Any], two: RankPool, tmp_path: Path
) -> None:
    expected = two.run(train, name, "ddp", str(tmp_path), options)[0]
    for result in two.run(train, name, plan, str(tmp_path), options):
        assert largest_difference(expected["weights"], result["weights"]) < 1e-9
        assert result["logged"] == pytest.approx(expected["logged"], abs=1e-6)  # Lightning adds them in fp32
    assert name == "gan" or len(expected["logged"]) == 3 * 7 + 1


@pytest.mark.soak
def test_a_module_with_a_session_trains_as_with_equal_shares(two: RankPool, tmp_path: Path) -> None:
    equal, shares = (two.run(train, "session", plan, str(tmp_path), {})[0] for plan in (EVEN, SHARES))
    assert largest_difference(equal["weights"], shares["weights"]) < 1e-9


@pytest.mark.parametrize("plan", [SHARES, pytest.param(SHARDED, marks=pytest.mark.soak)], ids=["replicate", "shard"])
def test_a_fabric_loop_trains_as_with_equal_shares(plan: Any, two: RankPool) -> None:
    expected = two.run(train_regression, "ddp")[0]
    for weights in two.run(train_regression, plan):
        assert largest_difference(expected, weights) < 1e-9


@pytest.mark.soak
@pytest.mark.parametrize("name", ["regression", "gan"])
def test_the_train_command_divides_batches_by_shares(name: str, two: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.yaml").touch()
    assert two.run(train_here, name, SHARES, str(run), {}) == ["", ""]
    expected = two.run(fit, name, "ddp", str(tmp_path))[0]
    assert largest_difference(expected["weights"], weights_of(RunFolder(run), name)) < 1e-9


class Stream(IterableDataset[Any]):
    """69 samples."""

    def __iter__(self) -> Any:
        return islice(iter(samples()), 69)


class Streams(LightningDataModule):
    def train_dataloader(self) -> "DataLoader[Any]":
        return DataLoader(Stream(), batch_size=12)


@pytest.mark.soak
@pytest.mark.parametrize("plan", [EVEN, SHARES], ids=["even", "shares"])
def test_a_batch_of_a_stream_has_its_own_weight(plan: Any, two: RankPool, tmp_path: Path) -> None:
    """Lightning reads streams one batch ahead, and the last batch is short."""
    fields = {"data": {"train": {"call": f"{__name__}:Streams"}}, "train": {"epochs": 2}}
    results = []
    with ranks(1) as one:
        for pool, plan_of_pool in ((one, {}), (two, plan)):
            run = tmp_path / str(pool.world_size)
            run.mkdir()
            (run / "job.yaml").touch()
            pool.run(train_here, "regression", plan_of_pool, str(run), fields)
            results.append(weights_of(RunFolder(run), "regression"))
    assert largest_difference(*results) < 1e-9


def test_shares_belong_to_the_batch_that_is_trained_on() -> None:
    """Lightning reads a batch ahead of some loaders, reads several loaders together, and sets them up again."""
    shares = SharesOfLoaders()
    note = shares.add_loader()
    note(batch_share(3, 4, 2))
    note(batch_share(1, 2, 2))  # read ahead
    assert [shares.begin().samples, shares.begin().samples, shares.begin().samples] == [3, 1, None]
    note(batch_share(2, 4, 2))  # is never trained on
    first, second = shares.add_loader(), shares.add_loader()
    first(batch_share(3, 4, 2))
    second(batch_share(6, 8, 2))
    assert shares.begin().weight == 1.5
    first(batch_share(3, 4, 2))
    second(batch_share(5, 8, 2))
    with pytest.raises(InputError, match=r"different shares of their batches on this rank \(3, 5 samples\)"):
        shares.begin()


class Gathering(Regression):
    def training_step(self, batch: Any, index: int) -> Tensor:
        self.all_gather(batch[0])
        return super().training_step(batch, index)


class Fetching(Regression):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


def refusals(rank: int, size: int, folder: str) -> list[str]:
    """What is refused with shares."""
    from meshwright.compat.lightning import MeshwrightStrategy

    def refused(loader: Any, module: Any, plan: Any = SHARES, **options: Any) -> str:
        trainer = make_trainer(rank, size, MeshwrightStrategy(plan=plan), folder, max_epochs=1, **options)
        with pytest.raises(InputError) as error:
            trainer.fit(module, loader)
        return str(error.value)

    loader: Any = DataLoader(samples(), batch_size=6)
    return [
        refused(DataLoader(Stream(), batch_size=6), Regression()),
        refused(loader, Regression(), use_distributed_sampler=False),
        refused(DataLoader(samples(), batch_size=1), Regression()),
        refused(loader, Gathering()),
        refused(loader, Fetching()),
        refused(loader, Regression(), {**SHARES, "shares": "adaptive"}),
    ]


def test_what_shares_refuse(two: RankPool, tmp_path: Path) -> None:
    expected = [
        "is a DataLoader with",
        "with SequentialSampler",
        "data rank 1 none",
        "[10, 6], [2, 6]",
        "dataloader_iter",
    ]
    for answers in two.run(refusals, str(tmp_path)):
        for part, answer in zip([*expected, "adaptive"], answers, strict=True):
            assert part in answer
            assert "\n" not in answer
