"""The plan's axes as a `DeviceMesh` with named dimensions, and this rank's position in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import InputError
from meshwright.parallel.torch_private import flatten_mesh
from meshwright.plan import Plan
from meshwright.plan_fields.groups import MESH_ORDER

DATA_AXES = ("replicate", "shard", "expert")  # the axes of the mesh whose ranks have different samples


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


def mesh_axes(plan: Plan) -> dict[str, int]:
    """The sizes of the mesh's axes that are larger than one, in their order. The expert axis takes its ranks from the
    shard axis, or if there is none from the replicate axis."""
    sizes = {name: getattr(plan.axes, name) for name in MESH_ORDER}
    if (experts := plan.axes.expert) > 1:
        sizes["shard" if plan.axes.shard > 1 else "replicate"] //= experts
    sizes["expert"] = experts
    after_shard = MESH_ORDER.index("shard") + 1
    order = (*MESH_ORDER[:after_shard], "expert", *MESH_ORDER[after_shard:])
    return {name: sizes[name] for name in order if sizes[name] > 1}


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh | None:
    """Returns a mesh of the axes that are larger than one; None if there is only one rank."""
    if plan.world_size != world_size:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but there are {world_size}: start"
            f" {plan.world_size} ranks (torchrun --nproc-per-node {plan.world_size}), or use a plan for {world_size}"
        )
    axes = mesh_axes(plan)
    if not axes:
        return None
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def has_axis(mesh: DeviceMesh | None, axis: str) -> bool:
    """Whether the mesh has this axis; an axis of one rank is left out."""
    return mesh is not None and axis in (mesh.mesh_dim_names or ())


def position_in_mesh(mesh: DeviceMesh | None, plan: Plan) -> MeshPosition:
    def coordinate(axis: str) -> int:
        return mesh.get_local_rank(axis) if mesh is not None and has_axis(mesh, axis) else 0

    context, tensor, pipeline = coordinate("context"), coordinate("tensor"), coordinate("pipeline")
    shards = mesh_axes(plan).get("shard", 1)
    return MeshPosition(
        data_rank=(coordinate("replicate") * shards + coordinate("shard")) * plan.axes.expert + coordinate("expert"),
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


def token_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of the ranks that hold the same part of the model as this rank and have different samples or tokens.
    Without a shard axis, they have copies of its parameters, except of experts (`expert_copies_group`)."""
    return joined_axes(mesh, (*DATA_AXES, "context"), "tokens").get_group()


def expert_copies_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of the ranks that hold the same experts as this rank, for a plan without a shard axis; None if there is
    no other such rank."""
    axes = ("replicate", "context")
    return joined_axes(mesh, axes, "expert_copies").get_group() if any(has_axis(mesh, axis) for axis in axes) else None


def data_group(mesh: DeviceMesh | None, plan: Plan) -> dist.ProcessGroup | None:
    """The group of the ranks that hold the same part of the model as this rank and have different samples; None if
    there is no other such rank."""
    if mesh is None or not any(has_axis(mesh, axis) for axis in DATA_AXES):
        return None
    return joined_axes(mesh, DATA_AXES, "data").get_group()


def joined_axes(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """A mesh with a single axis of the ranks of those of these axes that the mesh has. If it has only one of them, it
    keeps its own name; otherwise it is called `name`."""
    present = tuple(axis for axis in axes if has_axis(mesh, axis))
    return mesh[present[0]] if len(present) == 1 else flatten_mesh(mesh[present], name)
