"""How many workers are started on a Ray cluster, and what each of them reserves."""

from typing import Any

import pytest

from meshwright.compat.ray.resources import choose_resources
from meshwright.errors import InputError
from meshwright.plan import Plan

CPUS = {"CPU": 4.0}
GPUS = {"CPU": 32.0, "GPU": 8.0}
TWO = Plan.model_validate({"axes": {"replicate": 2}})


@pytest.mark.parametrize(
    ("plan", "workers", "cluster", "available", "text"),
    [
        ("auto", None, "local", CPUS, "4 workers with 1 CPU each"),
        ("auto", None, "local", GPUS, "8 workers with 1 GPU and 1 CPU each"),
        ("auto", 3, "local", GPUS, "3 workers with 1 GPU and 1 CPU each"),
        ("auto", None, "2xcpu", GPUS, "32 workers with 1 CPU each"),
        ("auto", 1, "8xH100", GPUS, "1 worker with 1 GPU and 1 CPU"),
        (TWO, None, "local", CPUS, "2 workers with 1 CPU each"),
        (TWO, 2, "local", GPUS, "2 workers with 1 GPU and 1 CPU each"),
        (
            Plan.model_validate({"axes": {"replicate": 2}, "compute": {"threads": 2}}),
            *(None, "local", CPUS, "2 workers with 2 CPU each"),
        ),
    ],
)
def test_workers_are_those_of_the_plan_or_all_devices(
    plan: Any, workers: int | None, cluster: str, available: dict[str, float], text: str
) -> None:
    assert str(choose_resources(plan, workers, cluster, available)) == text


@pytest.mark.parametrize(
    ("plan", "workers", "available", "complaint"),
    [
        (TWO, 3, CPUS, r"--workers 3: the plan \(replicate 2 · fp32\) is for 2 ranks"),
        ("auto", 5, CPUS, "5 workers with 1 CPU each do not fit .* 4 CPUs: use at most --workers 4"),
        (TWO, None, {"CPU": 1.0}, "2 workers with 1 CPU each do not fit .* 1 CPU: use fewer ranks"),
        ("auto", None, {}, "1 workers? with 1 CPU .* no CPUs"),
        (Plan.model_validate({"gradients": {"servers": 1}, "axes": {"replicate": 2}}), None, CPUS, "parameter servers"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    plan: Any, workers: int | None, available: dict[str, float], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        choose_resources(plan, workers, "local", available)
