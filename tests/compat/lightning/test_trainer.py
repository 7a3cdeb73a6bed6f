"""Lightning's Trainer with our strategy: weights as under Lightning's own DDP, and checkpoints of both formats."""

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

from meshwright.errors import CheckpointError
from tests.compat.lightning.modules import Samples, largest_difference
from tests.compat.lightning.trainers import MODULES, fit, make_trainer, same_on_ranks
from tests.ranks import RankPool, ranks
from tests.soaked import all_but, some_in_core

TOLERANCE = 1e-9
HALF = {"max_epochs": 3}


def plans(size: int) -> list[dict[str, Any]]:
    return [{"axes": {"replicate": size}}, {"axes": {"shard": size}}]


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what Lightning's own DDP trains, by module and number of ranks."""
    results: dict[tuple[str, int], dict[str, Any]] = {}

    def train(name: str, pool: RankPool) -> dict[str, Any]:
        key = (name, pool.world_size)
        if key not in results:
            results[key] = pool.run(fit, name, "ddp", str(tmp_path_factory.mktemp("ddp")))[0]
        return results[key]

    return train


@pytest.mark.parametrize("name", some_in_core(all_but({"regression", "gan"}, MODULES)))
def test_two_ranks_train_the_weights_of_ddp(name: str, two: RankPool, of_ddp: Any, tmp_path: Path) -> None:
    for plan in plans(2):
        results = two.run(fit, name, plan, str(tmp_path))
        assert same_on_ranks(results)
        assert largest_difference(of_ddp(name, two)["weights"], results[0]["weights"]) < TOLERANCE
        assert results[0]["validations"] == pytest.approx(of_ddp(name, two)["validations"], abs=TOLERANCE)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", list(MODULES))
def test_other_numbers_of_ranks(name: str, size: int, of_ddp: Any, tmp_path: Path) -> None:
    with ranks(size) as pool:
        for plan in plans(size):
            weights = pool.run(fit, name, plan, str(tmp_path))[0]["weights"]
            assert largest_difference(of_ddp(name, pool)["weights"], weights) < TOLERANCE


@pytest.mark.soak
def test_the_number_of_ranks_does_not_change_the_weights(two: RankPool, of_ddp: Any) -> None:
    with ranks(1) as one:
        for name in ("regression", "gan"):
            assert largest_difference(of_ddp(name, one)["weights"], of_ddp(name, two)["weights"]) < TOLERANCE


@pytest.mark.parametrize("name", all_but({"gan"}, ["regression", "gan"]))
@pytest.mark.parametrize("layout", all_but({"meshwright"}, ["lightning", "meshwright"]))
def test_a_checkpoint_continues_under_another_plan(
    name: str, layout: str, two: RankPool, of_ddp: Any, tmp_path: Path
) -> None:
    """The first half is trained sharded, the second by replicas, and the other way round."""
    expected = of_ddp(name, two)["weights"]
    for number, (first, second) in enumerate([plans(2), plans(2)[::-1]]):
        path = str(tmp_path / f"{number}.ckpt")
        options = {"checkpoint_format": layout}
        two.run(fit, name, first, str(tmp_path), HALF, None, path, options)
        assert Path(path).is_dir() == (layout == "meshwright")
        results = two.run(fit, name, second, str(tmp_path), None, path, None, options)
        assert largest_difference(expected, results[0]["weights"]) < TOLERANCE


@pytest.mark.parametrize("first", all_but({"ours"}, ["ddp", "ours"]))
def test_checkpoints_are_exchanged_with_ddp(first: str, two: RankPool, of_ddp: Any, tmp_path: Path) -> None:
    path, sharded = str(tmp_path / "last.ckpt"), plans(2)[1]
    saves, loads = ("ddp", sharded) if first == "ddp" else (sharded, "ddp")
    two.run(fit, "regression", saves, str(tmp_path), HALF, None, path)
    weights = two.run(fit, "regression", loads, str(tmp_path), None, path)[0]["weights"]
    assert largest_difference(of_ddp("regression", two)["weights"], weights) < TOLERANCE


def refusals(rank: int, size: int, folder: str) -> tuple[str, str]:
    """The errors of a checkpoint whose tensors were changed, and of a folder that is none."""
    import torch.distributed as dist

    plan, options = {"axes": {"shard": size}}, {"checkpoint_format": "meshwright"}
    for name in ("first", "second"):
        fit(rank, size, "regression", plan, folder, {"max_epochs": 1}, None, f"{folder}/{name}.ckpt", options)
    if rank == 0:
        file = Path(folder) / "second.ckpt" / "rank-00000.bin"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    messages = []
    for loads in (f"{folder}/second.ckpt", folder):
        with pytest.raises(CheckpointError) as error:
            fit(rank, size, "regression", plan, folder, None, loads, None, options)
        messages.append(str(error.value))
    return messages[0], messages[1]


def test_damaged_checkpoints_are_refused_and_others_named(two: RankPool, tmp_path: Path) -> None:
    for damage, no_checkpoint in two.run(refusals, str(tmp_path)):
        assert "second.ckpt: rank-00000.bin does not have the checksum" in damage
        assert damage.endswith(f"give the path of another checkpoint; {tmp_path} has first.ckpt")
        assert "is a folder without manifest.json" in no_checkpoint
        assert no_checkpoint.endswith("first.ckpt, second.ckpt")


@pytest.mark.soak
def test_accumulation_and_clipping_by_value(two: RankPool, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    expected = two.run(fit, "regression", "ddp", str(tmp_path), options)[0]
    for plan in plans(2):
        weights = two.run(fit, "regression", plan, str(tmp_path), options)[0]["weights"]
        assert largest_difference(expected["weights"], weights) < TOLERANCE


def automatic(rank: int, size: int, name: str, folder: str) -> tuple[str, list[str]]:
    from meshwright.compat.lightning import MeshwrightStrategy

    strategy = MeshwrightStrategy(plan="auto")
    trainer = make_trainer(rank, size, strategy, folder, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(MODULES[name](), datamodule=Samples(size, rank))
    messages = [str(warning.message) for warning in caught]
    return strategy.plan.summary(), [message for message in messages if message.startswith("plan 'auto'")]


def test_an_automatic_plan_is_searched_with_a_batch_of_the_loader(two: RankPool, tmp_path: Path) -> None:
    (plan, messages), (same_plan, _) = two.run(automatic, "regression", str(tmp_path))
    assert plan == same_plan
    assert messages == []


def test_an_automatic_plan_of_steps_that_cannot_be_traced_is_replicas(two: RankPool, tmp_path: Path) -> None:
    plan, messages = two.run(automatic, "gan", str(tmp_path))[0]
    assert plan.startswith("replicate 2")
    assert len(messages) == 1
