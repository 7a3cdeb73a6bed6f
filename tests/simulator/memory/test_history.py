"""The memory of a step over time reaches exactly the predicted peak, and names the tensors that are alive then."""

from typing import Any

import pytest
import torch

from meshwright.plan import Plan
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.simulator.memory.device_memory import CUDA_MEMORY
from meshwright.simulator.memory.history import MemoryHistory, memory_histories
from meshwright.simulator.memory.peak import rank_memories
from meshwright.simulator.pipeline.order import pipeline_order
from meshwright.simulator.pipeline.timeline import timeline
from tests.simulator.memory.test_peak import eight_blocks

BATCH = 4
PIPELINE = {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 6, "cuts": ["blocks.3"]}}


def histories(most_points: int = 400, **groups: Any) -> tuple[list[MemoryHistory], list[int]]:
    """Returns the history of each rank, and the predicted peak of each."""
    plan = Plan.model_validate(groups)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=True)
    order = pipeline_order("1f1b", plan.axes.pipeline, 1, plan.pipeline.microbatches)
    stages = timeline(order, lambda action: 1.0, lambda source, target: 0.0) if plan.axes.pipeline > 1 else None
    arguments = (eight_blocks(), plan, BATCH, adam, CUDA_MEMORY)
    found = memory_histories(*arguments, lambda operator, backward: 1e-3, stages, most_points)
    return found, [memory.allocated_bytes for memory in rank_memories(*arguments)]


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"axes": {"replicate": 2}},
        {"axes": {"shard": 4}},
        {"axes": {"shard": 4}, "memory": {"sharding": "optimizer", "accumulation": 2}},
        {"axes": {"tensor": 4}},
        PIPELINE,
    ],
    ids=["one rank", "replicate", "shard", "shard optimizer", "tensor", "pipeline"],
)
def test_the_largest_point_is_the_predicted_peak(groups: dict[str, Any]) -> None:
    found, peaks = histories(**groups)
    assert [history.peak.total_bytes for history in found] == pytest.approx(peaks, rel=1e-9)


def test_few_points_keep_the_peak_and_the_order_of_time() -> None:
    (whole,), _ = histories()
    (few,), (peak,) = histories(most_points=20)
    assert len(few.points) <= 20 < len(whole.points)
    assert few.peak.total_bytes == peak
    times = [point.at_s for point in whole.points]
    assert times == sorted(times)
    assert times[-1] > 0


def test_tensors_alive_at_the_peak_add_up_to_activations_and_temporaries() -> None:
    (history,), _ = histories()
    kinds = history.peak.bytes_by_kind
    alive = sum(size for _, _, size in history.alive_at_peak)
    assert alive == pytest.approx(kinds["activations"] + kinds["temporaries"], rel=0.01)
    assert any(" to blocks.6: attention" in layer for layer, _, _ in history.alive_at_peak)
