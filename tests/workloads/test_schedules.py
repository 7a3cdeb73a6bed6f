import pytest
import torch

from meshwright.errors import InputError
from meshwright.workloads.schedules import warmup_cosine


def rates(warmup: int, total: int, floor: float, steps: int) -> list[float]:
    """The rate of each step, for a group of rate 1 and the second of two groups."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (3.0, 1.0)]
    optimizer = torch.optim.SGD(groups)
    schedule = warmup_cosine(optimizer, warmup, total, floor)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[1]["lr"])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(3 * found[-1])
        optimizer.step()
        schedule.step()
    return found


def test_up_evenly_then_down_a_cosine_then_the_floor() -> None:
    assert rates(4, 8, 0.2, 11) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.882843, 0.6, 0.317157, 0.2, 0.2, 0.2])
    assert rates(0, 2, 0.0, 3) == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize(("warmup", "total", "floor"), [(5, 5, 0.1), (-1, 5, 0.1), (1, 5, 1.1)])
def test_a_schedule_that_cannot_be_is_refused(warmup: int, total: int, floor: float) -> None:
    with pytest.raises(InputError, match="schedule: "):
        rates(warmup, total, floor, 1)
