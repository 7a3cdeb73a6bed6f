"""A job that cannot run is refused before ranks are started."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.check import check_devices, check_job, check_rank_count
from meshwright.train.shares.check import check_global_batch
from tests.train.one_process import EVALUATED, toy_job

TWO = find_cluster("2xcpu")


class NeedsMemory(nn.Module):
    """Reads values while it is built, which tensors without memory do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 5)
        self.scale = float(self.layer.weight.detach().sum())

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def plan(replicate: int = 1, accumulation: int = 1) -> Plan:
    return Plan.model_validate({"axes": {"replicate": replicate}, "memory": {"accumulation": accumulation}})


def test_a_valid_job_passes_and_the_check_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    check_job(toy_job(**EVALUATED, checkpoint={"best": "accuracy"}), plan(2), TWO)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_needs_memory_to_be_built_passes() -> None:
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta tensors"):
        NeedsMemory()
    check_job(toy_job(model={"call": "tests.train.test_check:NeedsMemory"}), plan(), TWO)


def test_every_rank_needs_a_device() -> None:
    check_devices(plan(2), TWO)
    with pytest.raises(InputError, match=r"plan.axes: replicate\(3\) = 3 ranks, but the cluster '2xcpu' has 2 devices"):
        check_devices(plan(3), TWO)


def test_a_machine_starts_a_limited_number_of_ranks() -> None:
    def machine(cores: int) -> Cluster:
        cluster = find_cluster("5000xcpu")
        return cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"cores": cores}),)})

    check_rank_count(plan(64), machine(2))
    check_rank_count(plan(1024), machine(96))
    with pytest.raises(InputError, match=r"has 1000 processes, but this machine has 2 cores and starts at most 64"):
        check_rank_count(plan(1000), machine(2))
    with pytest.raises(InputError, match=r"has 1025 processes, but this machine has 96 cores and starts at most 1024"):
        check_rank_count(plan(1025), machine(96))


def test_every_microbatch_needs_a_sample() -> None:
    check_global_batch(plan(2, 3), 6)
    with pytest.raises(InputError, match=r"global_batch is 5, smaller than 2 data-parallel ranks × 3 microbatches = 6"):
        check_global_batch(plan(2, 3), 5)


def shared(samples: list[int], **groups: Any) -> Plan:
    return Plan.model_validate({"axes": {"replicate": 2}, "shares": samples, **groups})


def test_every_rank_needs_samples_of_a_full_batch() -> None:
    check_global_batch(shared([3, 1]), 4)
    with pytest.raises(InputError, match=r"of a train.global_batch of 8, .*\[100, 1\] gives data rank 1 none: raise"):
        check_global_batch(shared([100, 1]), 8)
    with pytest.raises(InputError, match=r"gives data rank 1 1, fewer than its 2 microbatches"):
        check_global_batch(shared([3, 1], memory={"accumulation": 2}), 4)


def test_parts_of_a_data_set_are_given_to_ranks_in_whole() -> None:
    check_global_batch(shared([2, 1]), 6, "sample", 3)
    with pytest.raises(InputError, match=r"data.parts is 2, too few for .*\[5, 1\].*: 6 parts divide exactly so"):
        check_global_batch(shared([5, 1]), 6, "sample", 2)
    adaptive = Plan.model_validate({"axes": {"replicate": 2}, "shares": "adaptive"})
    with pytest.raises(InputError, match=r"shares.adaptive is true, but data.partition is sample"):
        check_global_batch(adaptive, 6, "sample")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"axes": {"pipeline": 2}}, "0 cuts make 1 stages, but 1f1b on 2 ranks runs 2: choose 1 of the modules after"),
        (
            {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["layers.6"], "microbatches": 2}},
            "the model cannot be cut after layers.6: nothing runs after it; the nearest cuts are after",
        ),
        ({"axes": {"tensor": 2}, "modules": {"splits": {"layer.6": {"kind": "none"}}}}, "did you mean 'layers.6'"),
        (
            {"numerics": {"precision": "bf16", "cast": "weights"}},
            "axes.shard is 1 and numerics.precision is bf16: change",
        ),
    ],
)
def test_a_plan_that_the_model_does_not_allow_is_refused_before_ranks_start(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        check_job(toy_job(), Plan.model_validate(plan), TWO)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
