"""Which ranks form which axis: the plan's axes as a named DeviceMesh, and this rank's position in it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import InputError
from meshwright.parallel.torch_private import flatten_mesh
from meshwright.plan import MESH_ORDER, Plan

_DATA_AXES = ("replicate", "shard")  # the axes whose ranks have different samples


@dataclass(frozen=True)
class MeshPosition:
    """The coordinates of a rank in the mesh.

    All ranks of one `data_rank` have the same samples. Exactly one of them is `first_of_data_rank`, and exactly one
    `reports_loss`: one that runs the last pipeline stage, where the loss is computed.
    """

    data_rank: int
    pipeline: int
    tensor: int
    first_of_data_rank: bool
    reports_loss: bool


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh | None:
    """A mesh of the axes that are larger than one; None on a single rank, which needs no communication."""
    if plan.world_size != world_size:
        raise InputError(f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but there are {world_size}")
    axes = {name: size for name in MESH_ORDER if (size := getattr(plan.axes, name)) > 1}
    if not axes:
        return None
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def position_in_mesh(mesh: DeviceMesh | None, plan: Plan) -> MeshPosition:
    def coordinate(axis: str) -> int:
        return mesh.get_local_rank(axis) if mesh is not None and getattr(plan.axes, axis) > 1 else 0

    tensor, pipeline = coordinate("tensor"), coordinate("pipeline")
    return MeshPosition(
        data_rank=coordinate("replicate") * plan.axes.shard + coordinate("shard"),
        pipeline=pipeline,
        tensor=tensor,
        first_of_data_rank=tensor == 0 and pipeline == 0,
        reports_loss=tensor == 0 and pipeline == last_stage(plan),
    )


def last_stage(plan: Plan) -> int:
    """The pipeline rank that runs the last stage. Schedule `zbv` with two stages per rank ends on the first rank."""
    return 0 if plan.pipeline.schedule == "zbv" and plan.stages_per_rank == 2 else plan.axes.pipeline - 1


def data_group(mesh: DeviceMesh | None, plan: Plan) -> dist.ProcessGroup | None:
    """The group of ranks that hold the same part of the model and have different samples. None if this is one rank."""
    axes = tuple(axis for axis in _DATA_AXES if getattr(plan.axes, axis) > 1)
    if mesh is None or not axes:
        return None
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    return flatten_mesh(mesh[axes], "data").get_group()
