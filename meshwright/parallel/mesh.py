"""Which ranks form which axis: the plan's axes as a named DeviceMesh, and what of the work this rank does alone."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import InputError
from meshwright.plan import MESH_ORDER, Plan

_DATA = ("replicate", "shard")


@dataclass(frozen=True)
class Place:
    """Where a rank stands. Ranks of one `data_rank` have the same samples: `first` is one of each such set, and
    `speaks` one of each that knows the loss, which is computed behind the last stage."""

    data_rank: int
    pipeline: int
    tensor: int
    first: bool
    speaks: bool


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh | None:
    """A mesh of the axes that are larger than one; None on a single rank, which needs no communication."""
    if plan.world_size != world_size:
        raise InputError(f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but there are {world_size}")
    axes = {name: size for name in MESH_ORDER if (size := getattr(plan.axes, name)) > 1}
    if not axes:
        return None
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def place_in(mesh: DeviceMesh | None, plan: Plan) -> Place:
    def along(axis: str) -> int:
        return mesh.get_local_rank(axis) if mesh is not None and getattr(plan.axes, axis) > 1 else 0

    tensor, pipeline = along("tensor"), along("pipeline")
    return Place(
        data_rank=along("replicate") * plan.axes.shard + along("shard"),
        pipeline=pipeline,
        tensor=tensor,
        first=tensor == 0 and pipeline == 0,
        speaks=tensor == 0 and pipeline == last_stage(plan),
    )


def last_stage(plan: Plan) -> int:
    """The pipeline rank that runs the last stage: a V of two stages a rank ends where it began."""
    return 0 if plan.pipeline.schedule == "zbv" and plan.stages_per_rank == 2 else plan.axes.pipeline - 1


def data_group(mesh: DeviceMesh | None, plan: Plan) -> dist.ProcessGroup | None:
    """The ranks with other samples and the same part of the model; None where there is but one."""
    axes = tuple(axis for axis in _DATA if getattr(plan.axes, axis) > 1)
    if mesh is None or not axes:
        return None
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    return mesh[axes]._flatten("data").get_group()
