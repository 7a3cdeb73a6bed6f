"""The job unet: on images and on volumes it learns the generated data, and trains under plans as on one device."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.export.export import export
from meshwright.plan import Plan
from meshwright.workloads.segmentation.dice import DiceCrossEntropy, mean_dice
from meshwright.workloads.segmentation.unet import UNet
from tests.export.runs import train_run
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.workloads.job_proofs import assert_loss_falls_as_the_file_says, prove_in_rank, small_job

VOLUMES = (
    "model.dimensions=3",
    *(f"data.{use}.{name}" for use in ("train", "eval") for name in ("dimensions=3", "size=16")),
)
TINY = ("model.width=4", "model.levels=2", "data.train.size=16", "train.global_batch=4")
PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "shard": {"axes": {"shard": 2}},
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["encoder.1.pool"], "microbatches": 2}},
}
CASES = [(kind, dimensions) for kind in PLANS for dimensions in (2, 3)]


@pytest.mark.parametrize("dimensions", all_but({2}, [2, 3]))
def test_the_loss_falls_as_the_job_file_says(dimensions: int) -> None:
    metrics = assert_loss_falls_as_the_file_says("unet", *(VOLUMES if dimensions == 3 else ()))
    assert metrics["dice"] > 0.9


@pytest.mark.parametrize(("kind", "dimensions"), all_but([], CASES))
def test_the_job_trains_under_plans_as_on_one_device(two: RankPool, tmp_path: Path, kind: str, dimensions: int) -> None:
    settings = (*(VOLUMES if dimensions == 3 else ()), *TINY)
    cache = Path(os.environ["XDG_CACHE_HOME"])
    proof = two.run(prove_in_rank, "unet", Plan.model_validate(PLANS[kind]), tmp_path, cache, *settings)[0]
    assert proof.equal, proof.first_difference


@pytest.mark.soak
def test_the_job_is_exported_as_a_program(tmp_path: Path) -> None:
    run = train_run(small_job("unet", *TINY, "train.steps=2", "log.tensorboard=false"), tmp_path / "run")
    metrics = export(run, "program").metrics
    assert metrics["loss"].after == pytest.approx(metrics["loss"].before, rel=1e-5)


def test_the_model_has_the_size_of_its_paper_and_keeps_the_size_of_images() -> None:
    with torch.device("meta"):
        model, images = UNet(), torch.empty(2, 1, 64, 48)
        assert model(images).shape == (2, 2, 64, 48)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 31
        volumes = UNet(dimensions=3, channels=2, classes=4, width=8, levels=3, most_features=16)
        assert volumes(torch.empty(2, 2, 8, 12, 16)).shape == (2, 4, 8, 12, 16)
        assert volumes.get_parameter("encoder.2.convolutions.0.weight").shape[0] == 16
        with pytest.raises(InputError, match=r"sizes must be multiples of 16"):
            model(torch.empty(2, 1, 64, 40))
    for keywords, words in (({"dimensions": 4}, "dimensions is 4"), ({"levels": 1}, "levels is 1")):
        with pytest.raises(InputError, match=words):
            UNet(**keywords)


def test_dice_is_the_mean_over_samples_and_classes() -> None:
    target = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 0]])[:, None]  # class 2 is missed, and the second sample is empty
    guess = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])[:, None]
    scores = 100.0 * torch.nn.functional.one_hot(guess, 3).movedim(-1, 1)
    total, count = mean_dice(scores, target)
    assert (float(total), count) == (pytest.approx((2 * 1 / 3 + 0) / 2 + 1), 2)
    dice = [(2 * 1 + 1) / (3 + 1), 1 / (1 + 1), 1, 1]
    loss = DiceCrossEntropy(dice_weight=2)(scores, target)
    expected = torch.nn.functional.cross_entropy(scores, target) + 2 * (1 - sum(dice) / 4)
    assert float(loss) == pytest.approx(float(expected))


def test_the_loss_of_a_batch_is_the_mean_of_its_samples() -> None:
    scores, target = torch.randn(4, 3, 5, 5), torch.randint(3, (4, 5, 5))
    loss = DiceCrossEntropy()
    of_samples = [float(loss(scores[i : i + 1], target[i : i + 1])) for i in range(4)]
    assert float(loss(scores, target)) == pytest.approx(sum(of_samples) / 4)
