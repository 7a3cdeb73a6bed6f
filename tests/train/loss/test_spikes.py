"""`SpikeDetector`: which loss is a spike."""

import math
import random

import pytest

from meshwright.train.loss.spikes import SpikeDetector
from meshwright.user.job_sections import SpikeSettings


def detector(window: int = 20, deviations: float = 10) -> SpikeDetector:
    return SpikeDetector(SpikeSettings(window=window, deviations=deviations))


def test_a_loss_far_above_the_others_is_a_spike_and_no_other_is() -> None:
    spikes, chance = detector(), random.Random(0)
    losses = [3.0 * math.exp(-step / 200) + chance.gauss(0, 0.05) for step in range(300)]
    assert [spikes.examine(loss) for loss in losses] == [None] * 300
    problem = spikes.examine(losses[-1] + 1)
    assert problem is not None
    assert problem.startswith(f"the loss is {losses[-1] + 1:.4g}, more than 10 deviations of ")
    assert problem.endswith("the median of the last 20 steps")
    assert spikes.examine(losses[-1] - 5) is None, "a low loss is none"


def test_negative_losses_have_spikes_too() -> None:
    spikes = detector()
    assert not any(spikes.examine(-7 + step % 3 / 10) for step in range(20))
    assert spikes.examine(-2.0)


def test_few_losses_decide_nothing_and_nan_is_not_remembered() -> None:
    spikes = detector()
    assert [spikes.examine(loss) for loss in (1.0, 100.0, 1.0, math.nan, math.inf)] == [None] * 5
    assert spikes.losses == [1.0, 100.0, 1.0]


def test_spikes_do_not_move_the_limit() -> None:
    spikes = detector(window=10)
    for step in range(10):
        spikes.examine(1 + step % 3 / 100)
    assert all(spikes.examine(5.0) for _ in range(100))


@pytest.mark.parametrize("window", [10, 50])
def test_a_restored_detector_decides_as_the_saved_one(window: int) -> None:
    saved, chance = detector(window, 4), random.Random(1)
    for _ in range(70):
        saved.examine(chance.gauss(2, 0.1))
    restored = detector(window, 4)
    restored.restore(saved.losses)
    losses = [chance.gauss(2, 0.3) for _ in range(100)]
    decisions = [saved.examine(loss) for loss in losses]
    assert decisions == [restored.examine(loss) for loss in losses]
    assert any(decisions)
