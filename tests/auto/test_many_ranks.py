"""Plans for thousands of ranks are applied on PyTorch's fake process group, one sampled rank after the other: the mesh,
the splits and the schedule of that rank are those that the prediction is made of. No weights are allocated."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.auto.inputs import planning_inputs
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.job import load_job
from meshwright.model_io.batch import split_batch
from meshwright.parallel.apply import apply
from meshwright.parallel.model import ParallelModel
from meshwright.plan import Plan
from meshwright.planner.offload import search_with_offload
from meshwright.simulator.communication.placement import axis_groups
from meshwright.simulator.pipeline.order import pipeline_order, stages_of_rank
from meshwright.simulator.pipeline.stages import StageProfile, stage_profiles
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.simulator.runtime import OUR_RUNTIME
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.train.job_parts import JobParts
from tests.simulator.pipeline.test_order import KINDS
from tests.soaked import all_but

FP32_BYTES = 4


@dataclass
class PlannedJob:
    """A plan, its prediction, and what both are of. `stages` are one rank's shares of the pipeline stages, as the
    prediction has them."""

    plan: Plan
    prediction: Prediction
    cluster: Cluster
    model: torch.nn.Module
    sample: Any
    stages: tuple[StageProfile, ...]


def planned_job(settings: list[str], cluster_name: str, plan: Plan | None) -> PlannedJob:
    """The GPT job with these settings under the plan, or under the best one if it is None."""
    cluster = find_cluster(cluster_name, None)
    inputs, profiles = planning_inputs(JobParts(load_job("jobs/gpt.yaml", settings)), cluster)
    if plan is None:
        plan = search_with_offload(inputs, profiles).ranked[0].plan
    inputs.check_plan(plan)
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    prediction = predict_plan(cluster, profile, plan, inputs.global_batch, inputs.optimizer)
    stages = stage_profiles(split_profile(profile, plan), plan.pipeline.cuts)
    return PlannedJob(plan, prediction, cluster, profiles.model, profiles.sample, stages)


@contextmanager
def fake_rank(job: PlannedJob, rank: int) -> Iterator[ParallelModel]:
    """The plan applied to the job's model as this rank sees it. Messages to other ranks do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=job.plan.world_size, store=FakeStore())
    try:
        model = deepcopy(job.model)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        yield apply(
            job.plan,
            model,
            torch.device("cpu"),
            job.plan.world_size,
            job.sample,
            fill=lambda module, layouts: None,
        )
    finally:
        dist.destroy_process_group()


def check_groups(mesh: DeviceMesh, rank: int, job: PlannedJob) -> None:
    """The group of each axis has the rank's peers along this axis, on the nodes that the prediction assumes."""
    node_of = [node for node, count in enumerate(_node_sizes(job.cluster)) for _ in range(count)]
    grid = torch.arange(job.plan.world_size).view([getattr(job.plan.axes, axis) for axis in mesh.mesh_dim_names or ()])
    place = list(torch.unravel_index(torch.tensor(rank), grid.shape))
    for number, axis in enumerate(mesh.mesh_dim_names or ()):
        peers = grid[tuple(slice(None) if at == number else place[at] for at in range(grid.dim()))].tolist()
        assert dist.get_process_group_ranks(mesh.get_group(axis)) == peers
        assert mesh.get_local_rank(axis) == peers.index(rank)
        priced = axis_groups(job.plan.axes, job.cluster)[axis]
        nodes = [node_of[peer] for peer in peers]
        assert (len(peers), peers[1] - peers[0]) == (priced.ranks, priced.stride)
        assert len(set(nodes)) == priced.nodes
        assert {nodes.count(node) for node in nodes} == {priced.per_node} == {priced.min_per_node}


def _node_sizes(cluster: Cluster) -> Iterable[int]:
    return (node.count for node in cluster.nodes for _ in range(node.number))


def check_parameters(parallel: ParallelModel, pipeline_rank: int, job: PlannedJob) -> None:
    """The rank has the parameters of its stages, each with the shape of its split and with one shard in memory."""
    plan = job.plan
    predicted = {p.names: p for stage in rank_stages(pipeline_rank, job) for p in job.stages[stage].profile.parameters}
    parameters = dict(parallel.module.named_parameters())
    assert len(parameters) == len(predicted)
    for names, parameter in predicted.items():
        name = next(name for name in names if name in parameters)
        # The vocabulary is padded in the prediction, and only there: it is that of the rank which has most.
        assert parameters[name].shape[1:] == parameter.shape[1:], name
        assert 0 <= parameter.shape[0] - parameters[name].shape[0] < plan.axes.tensor, name
        local = local_tensor(parameters[name])
        rows = -(-parameters[name].shape[0] // plan.axes.shard)
        assert local.numel() <= rows * prod(parameters[name].shape[1:])
        assert local.device.type == "meta"
    weights = [sum(p.bytes for p in stage.profile.parameters) for stage in job.stages]
    by_rank = [sum(weights[s] for s in rank_stages(rank, job)) / plan.axes.shard for rank in range(plan.axes.pipeline)]
    assert job.prediction.memory.breakdown["weights"] in [round(size) for size in by_rank]
    # FSDP2 divides rows: the first shards of a weight have up to one row more than its last.
    local_bytes = sum(local_tensor(p).numel() for p in parameters.values()) * FP32_BYTES
    rows_bytes = sum(prod(p.shape[1:]) for p in parameters.values()) * FP32_BYTES
    assert abs(local_bytes - by_rank[pipeline_rank]) <= rows_bytes


def local_tensor(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def rank_stages(pipeline_rank: int, job: PlannedJob) -> tuple[int, ...]:
    return stages_of_rank(job.plan.pipeline.schedule, job.plan.axes.pipeline, job.plan.stages_per_rank, pipeline_rank)


def check_schedule(parallel: ParallelModel, pipeline_rank: int, job: PlannedJob) -> None:
    """PyTorch's schedule of this rank has the actions, in the order, that the simulator times."""
    plan, executor = job.plan, parallel.pipeline
    assert executor is not None
    assert tuple(stage.index for stage in executor.local_stages.stages) == rank_stages(pipeline_rank, job)
    runner = executor._runner_for([split_batch(job.sample, None)] * plan.pipeline.microbatches)
    schedule: Any = runner._schedule
    orders = getattr(schedule, "pipeline_order_with_comms", None) or schedule._get_pipeline_order()
    built = [action for action in orders[pipeline_rank] if action is not None]
    sizes = plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, plan.pipeline.microbatches
    actions = [(a.stage_index, a.microbatch_index, KINDS[a.computation_type]) for a in built if a.is_compute_op]
    assert actions == list(pipeline_order(*sizes)[pipeline_rank])
    assert (runner._stages[0].dw_builder is None) == OUR_RUNTIME.splits_backward(plan)
    timeline = job.prediction.timeline
    assert timeline is not None
    assert {action.stage for action in timeline.order[pipeline_rank]} == {stage for stage, _, _ in actions}


def check_rank(rank: int, job: PlannedJob) -> None:
    with fake_rank(job, rank) as parallel:
        assert parallel.mesh is not None
        pipeline_rank = rank // (job.plan.world_size // job.plan.axes.pipeline)
        assert parallel.position.pipeline == pipeline_rank
        assert parallel.position.tensor == rank % job.plan.axes.tensor
        check_groups(parallel.mesh, rank, job)
        check_parameters(parallel, pipeline_rank, job)
        check_schedule(parallel, pipeline_rank, job)


@pytest.fixture(scope="module")
def small_job() -> PlannedJob:
    blocks = [f"blocks.{block}" for block in range(16)]
    plan = Plan.model_validate(
        {
            "axes": {"shard": 2, "tensor": 4, "pipeline": 8},
            "pipeline": {"schedule": "interleaved_1f1b", "microbatches": 16, "cuts": blocks[:15]},
            "modules": {"sequence": True, "loss": True},
            "memory": {"sharding": "optimizer"},
            "numerics": {"precision": "bf16"},
        }
    )
    sizes = {"layers": 16, "hidden": 64, "heads": 8, "sequence": 32, "vocabulary": 258}
    settings = [f"model.{name}={size}" for name, size in sizes.items()]
    settings += ["data.synthetic=true", "data.train.sequence=32", "data.eval.sequence=32", "train.global_batch=64"]
    return planned_job(settings, "8x8xH100@400G", plan)


@pytest.mark.parametrize("rank", all_but({27}, [0, 27, 63]))
def test_a_sampled_rank_of_64_has_the_groups_weights_and_schedule_of_the_prediction(
    small_job: PlannedJob, rank: int
) -> None:
    check_rank(rank, small_job)


def test_the_tensor_axis_lies_within_a_node_then_shards_and_stages_lie_across(small_job: PlannedJob) -> None:
    groups = axis_groups(small_job.plan.axes, small_job.cluster)
    assert (groups["tensor"].nodes, groups["shard"].nodes, groups["pipeline"].nodes) == (1, 1, 8)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sampled_ranks_of_10000_have_the_groups_weights_and_schedule_of_the_best_plan_for_a_trillion_parameters() -> (
    None
):
    job = planned_job(["model.size=1T", "train.global_batch=10000"], "1250x8xH100@400G", None)
    assert job.plan.world_size == 10_000
    last = job.plan.world_size - 1
    of_stage = job.plan.world_size // job.plan.axes.pipeline
    for rank in (0, of_stage - 1, of_stage, last // 2 + 3, last - of_stage, last):
        check_rank(rank, job)
