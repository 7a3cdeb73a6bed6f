"""`MeshwrightTrainer` gives the losses of one process with shares of global batches that are not equal."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate: pip install accelerate")

from accelerate import Accelerator
from torch.utils.data import DataLoader

from meshwright.compat.transformers.batches import divide_loader
from meshwright.data.batch import SampleShare
from meshwright.errors import InputError
from tests.compat.transformers.test_trainer import assert_close
from tests.compat.transformers.trainers import Stream, Texts, launched, train
from tests.ranks import RankPool

SHARES = {"axes": {"replicate": 2}, "shares": [3, 1]}
ACCUMULATED = {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_steps": -1}


def of_one_process(folder: Path, name: str, samples: int, options: dict[str, Any]) -> dict[str, Any]:
    return train(0, 1, name, "trainer", str(folder / "one"), samples, None, options)


def test_shares_give_the_losses_of_one_process(two: RankPool, tmp_path: Path) -> None:
    # The last batch of an epoch has one sample, of which the second rank gets none.
    results = two.run(train, "llama", SHARES, str(tmp_path), 21, None, ACCUMULATED)
    assert results[0] == results[1]
    assert_close(results[0], of_one_process(tmp_path, "llama", 21, ACCUMULATED))


@pytest.mark.soak
@pytest.mark.parametrize("plan", [SHARES, {**SHARES, "axes": {"shard": 2}}], ids=["replicate", "shard"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("classifier", {"gradient_accumulation_steps": 2}),
        ("llama of means", {"gradient_accumulation_steps": 2}),
        ("classifier", {"own_loss": True, "gradient_accumulation_steps": 2}),
        ("llama", {"is_stream": True, "max_steps": 7}),
        ("llama", {"is_stream": True, "dataloader_drop_last": True}),
        ("llama", {"dataloader_num_workers": 2}),
        ("llama", {"train_sampling_strategy": "group_by_length"}),
    ],
    ids=str,
)
def test_arguments_mean_the_same_with_shares(
    plan: Any, name: str, options: dict[str, Any], two: RankPool, tmp_path: Path
) -> None:
    results = two.run(train, name, plan, str(tmp_path), 23, None, options)
    assert_close(results[0], of_one_process(tmp_path, name, 23, options))


@pytest.mark.soak
def test_shares_of_tensor_groups(four: RankPool, tmp_path: Path) -> None:
    plan = {"axes": {"replicate": 2, "tensor": 2}, "shares": [3, 1]}
    results = four.run(train, "llama", plan, str(tmp_path), 23)
    assert_close(results[0], of_one_process(tmp_path, "llama", 23, {}))


@pytest.mark.soak
def test_a_resumed_training_goes_on_with_its_shares(two: RankPool, tmp_path: Path) -> None:
    options = {"save_steps": 3, "save_strategy": "steps"}
    whole = two.run(train, "llama", SHARES, str(tmp_path / "whole"), 22, None, options)[0]
    two.run(train, "llama", SHARES, str(tmp_path / "run"), 22, None, {**options, "stop": 4})
    resumed = two.run(train, "llama", SHARES, str(tmp_path / "run"), 22, True, options)[0]
    assert resumed["losses"] == whole["losses"]


def test_shares_of_samples_and_of_streams_are_the_same() -> None:
    def lengths(data: Any, rank: int, drop_last: bool) -> list[int]:
        loader: Any = DataLoader(data, batch_size=4, drop_last=drop_last, collate_fn=len)
        return list(divide_loader(loader, 2, SampleShare(rank, 2, samples=(5, 3))))

    with launched(0, 1):
        Accelerator(cpu=True)  # whose state the sampler needs
        for drop_last, expected in ((False, [[5, 5, 1], [3, 3, 1]]), (True, [[5, 5], [3, 3]])):
            for data in (Texts(18), Stream(18)):
                assert [lengths(data, rank, drop_last) for rank in range(2)] == expected


def test_a_batch_that_is_too_small_for_the_shares_is_refused() -> None:
    loader: Any = DataLoader(Texts(18), batch_size=1)
    with pytest.raises(
        InputError, match=r"of a global batch of 2 samples, plan.shares.samples \[9, 1\] gives data rank 1 none"
    ):
        divide_loader(loader, 2, SampleShare(0, 2, samples=(9, 1)))
