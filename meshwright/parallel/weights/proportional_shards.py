"""Which rows of a weight each rank of the shard axis holds: equally many, or in proportion to `plan.shares.shards`.

    even            rank r of t holds the rows [r · c, min((r + 1) · c, n)),  c = ceil(n / t), as FSDP2 divides them
    proportional    rank r holds `share_sizes(n, proportions)[r]` rows, after those of the ranks before it

Weights, gradients and optimizer state are `DTensor`s, whose placement does not tell the two apart, and torch makes new
ones from them at any time. The mesh does: the axis over which FSDP2 shards in proportion has a name that says so, such
as `shard 2:1` (`proportional_mesh`), and every tensor keeps its mesh. `DTensor.full_tensor` and
`distribute_tensor` only know even shards; layout.py has functions that know both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.plan_fields.shares import share_sizes

_AXIS = "shard "  # followed by the proportions, which no axis of a plan's mesh has in its name


@dataclass(frozen=True)
class RowDivision:
    """How the ranks of axis number `axis` of a tensor's mesh divide dimension `dim`: `rows` by rank."""

    axis: int
    dim: int
    rows: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        """The first row of this rank."""
        return sum(self.rows[: self.rank])


def proportional_mesh(mesh: DeviceMesh, proportions: Sequence[int]) -> DeviceMesh:
    """The mesh of the axes `replicate`, if there is one, and `shard` with the same process groups, whose shard axis has
    a name that contains the proportions."""
    names = tuple(name for name in ("replicate", "shard") if name in (mesh.mesh_dim_names or ()))
    groups = [mesh.get_group(name) for name in names]
    new_names = (*names[:-1], _AXIS + ":".join(map(str, proportions)))
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=new_names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh[names].mesh, mesh_dim_names=new_names)


def rows_of_ranks(rows: int, mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    """How many of the rows of a weight each rank of an axis of the mesh holds."""
    name = (mesh.mesh_dim_names or ("",) * mesh.ndim)[axis]
    if name.startswith(_AXIS):
        return tuple(share_sizes(rows, [int(number) for number in name.removeprefix(_AXIS).split(":")]))
    ranks = mesh.size(axis)
    chunk = -(-rows // ranks)
    return tuple(max(0, min(chunk, rows - chunk * rank)) for rank in range(ranks))


def row_division(tensor: DTensor) -> RowDivision | None:
    """How FSDP2's ranks divide a tensor; None if each of them has the whole tensor."""
    placements = [(axis, p.dim) for axis, p in enumerate(tensor.placements) if isinstance(p, Shard)]
    if not placements:
        return None
    ((axis, dim),) = placements
    mesh = tensor.device_mesh
    return RowDivision(axis, dim, rows_of_ranks(tensor.shape[dim], mesh, axis), mesh.get_local_rank(axis))
