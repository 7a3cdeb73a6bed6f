import pytest
import torch

from meshwright.errors import InputError
from meshwright.workloads.schedules import warmup_cosine


def rates(warmup: int, total: int, floor: float, steps: int) -> list[float]:
    """The learning rate of each step of the second of two groups, whose initial rate is 1."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (3.0, 1.0)]
    optimizer = torch.optim.SGD(groups)
    schedule = warmup_cosine(optimizer, warmup, total, floor)
    step_rates = []
    for _ in range(steps):
        step_rates.append(optimizer.param_groups[1]["lr"])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(3 * step_rates[-1])
        optimizer.step()
        schedule.step()
    return step_rates


def test_the_rate_rises_linearly_then_falls_along_a_cosine_to_the_floor() -> None:
    assert rates(4, 8, 0.2, 11) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.882843, 0.6, 0.317157, 0.2, 0.2, 0.2])
    assert rates(0, 2, 0.0, 3) == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize(("warmup", "total", "floor"), [(5, 5, 0.1), (-1, 5, 0.1), (1, 5, 1.1)])
def test_an_impossible_schedule_is_an_input_error(warmup: int, total: int, floor: float) -> None:
    with pytest.raises(InputError, match="schedule: "):
        rates(warmup, total, floor, 1)
