"""Schedules of learning rates have the values that DeepSpeed 0.19.8 computes."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.compat.deepspeed_config.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer(lr: float = 0.1, groups: int = 1) -> Any:
    values = [{"lr": lr * (number + 1), "betas": (0.9, 0.99)} for number in range(groups)]
    return SimpleNamespace(param_groups=values, defaults={"betas": (0.9, 0.99)})


def rates(schedule: Any, steps: int) -> list[float]:
    """The learning rates before the first step and after each of `steps`."""
    values = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        values.append(schedule.optimizer.param_groups[0]["lr"])
    return values


def test_warm_up_begins_at_its_lowest_value_twice() -> None:
    assert rates(WarmupLR(optimizer(), 0.0, 0.2, 4, "linear"), 6) == pytest.approx([0, 0, 0.05, 0.1, 0.15, 0.2, 0.2])
    logarithmic = [0.0, 0.0, *(0.2 * math.log(step) / math.log(4) for step in (2, 3, 4)), 0.2]
    assert rates(WarmupLR(optimizer(), 0.0, 0.2, 4), 5) == pytest.approx(logarithmic)


def test_each_group_warms_up_to_its_own_rate() -> None:
    schedule = WarmupLR(optimizer(groups=2), warmup_num_steps=2)
    schedule.step(2)
    assert schedule.get_last_lr() == pytest.approx([0.1, 0.2])


def test_decay_reaches_zero_and_stays_there() -> None:
    schedule = WarmupDecayLR(optimizer(), 6, 0.0, 0.4, 2, "linear")
    assert rates(schedule, 8) == pytest.approx([0, 0, 0.2, 0.4, 0.3, 0.2, 0.1, 0, 0])


def test_cosine_ends_at_its_lowest_ratio() -> None:
    schedule = WarmupCosineLR(optimizer(), 6, 0.5, 2, 0.1, "linear")
    expected = [0.0, 0.05, 0.075]
    expected += [0.1 * (0.1 + 0.9 * (1 + math.cos(math.pi * progress / 4)) / 2) for progress in (1, 2, 3, 4, 4)]
    assert rates(schedule, 7) == pytest.approx(expected)


def test_one_cycle_rises_falls_and_decays() -> None:
    schedule = OneCycle(optimizer(), 0.1, 0.5, 1.0, 2, decay_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9)
    assert schedule.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert rates(schedule, 6) == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2])
    schedule.step(1)
    assert schedule.get_mom() == [(pytest.approx(0.8), 0.99)]


def test_range_test_rises_without_end_or_in_stairs() -> None:
    assert rates(LRRangeTest(optimizer(), 0.1, 2, 1.0), 4) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    stairs = rates(LRRangeTest(optimizer(), 0.1, 2, 1.0, lr_range_test_staircase=True), 4)
    assert stairs == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_a_schedule_continues_from_its_state() -> None:
    whole = rates(WarmupDecayLR(optimizer(), 9, 0.0, 0.4, 3), 8)
    first, second = WarmupDecayLR(optimizer(), 9, 0.0, 0.4, 3), WarmupDecayLR(optimizer(), 9, 0.0, 0.4, 3)
    rates(first, 4)
    second.load_state_dict(first.state_dict())
    assert rates(second, 4)[1:] == whole[5:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmupLR(optimizer(), warmup_num_steps=-5), "warmup_num_steps is -5"),
        (lambda: LRRangeTest(optimizer(), lr_range_test_step_size=0), "lr_range_test_step_size is 0"),
        (lambda: OneCycle(optimizer(), 0.1, 0.2, cycle_first_step_size=0), "cycle_first_step_size is 0"),
        (lambda: OneCycle(optimizer(), [0.1, 0.2], 0.2), "cycle_min_lr has 2 values"),
    ],
)
def test_wrong_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
