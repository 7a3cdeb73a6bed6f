"""The plan's axes as a `DeviceMesh` with named dimensions, and this rank's position in it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import InputError
from meshwright.parallel.torch_private import flatten_mesh
from meshwright.plan import Plan
from meshwright.plan_fields.groups import MESH_ORDER

_DATA_AXES = ("replicate", "shard")  # the axes whose ranks have different samples


@dataclass(frozen=True)
class MeshPosition:
    """The coordinates of a rank in the mesh.

    All ranks with the same `data_rank` have the same samples. For exactly one of them `first_of_data_rank` is true, and
    for exactly one `reports_loss`: a rank that runs the last pipeline stage, where the loss is computed.
    """

    data_rank: int
    pipeline: int
    context: int
    tensor: int
    first_of_data_rank: bool
    reports_loss: bool


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh | None:
    """Returns a mesh of the axes that are larger than one; None if there is only one rank."""
    if plan.world_size != world_size:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but there are {world_size}: start"
            f" {plan.world_size} ranks (torchrun --nproc-per-node {plan.world_size}), or use a plan for {world_size}"
        )
    axes = {name: size for name in MESH_ORDER if (size := getattr(plan.axes, name)) > 1}
    if not axes:
        return None
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def position_in_mesh(mesh: DeviceMesh | None, plan: Plan) -> MeshPosition:
    def coordinate(axis: str) -> int:
        return mesh.get_local_rank(axis) if mesh is not None and getattr(plan.axes, axis) > 1 else 0

    context, tensor, pipeline = coordinate("context"), coordinate("tensor"), coordinate("pipeline")
    return MeshPosition(
        data_rank=coordinate("replicate") * plan.axes.shard + coordinate("shard"),
        pipeline=pipeline,
        context=context,
        tensor=tensor,
        first_of_data_rank=context == 0 and tensor == 0 and pipeline == 0,
        reports_loss=context == 0 and tensor == 0 and pipeline == last_stage(plan),
    )


def last_stage(plan: Plan) -> int:
    """The coordinate along the pipeline axis of the rank that runs the last stage: 0 for schedule `zbv` with two stages
    per rank, otherwise the largest."""
    return 0 if plan.pipeline.schedule == "zbv" and plan.stages_per_rank == 2 else plan.axes.pipeline - 1


def data_group(mesh: DeviceMesh | None, plan: Plan) -> dist.ProcessGroup | None:
    """The group of the ranks that hold the same part of the model as this rank and have different samples; None if
    there is no other such rank."""
    axes = tuple(axis for axis in _DATA_AXES if getattr(plan.axes, axis) > 1)
    if mesh is None or not axes:
        return None
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    return flatten_mesh(mesh[axes], "data").get_group()
