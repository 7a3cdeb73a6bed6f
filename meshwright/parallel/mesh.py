"""Which ranks form which axis: the plan's axes as a named DeviceMesh."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import InputError
from meshwright.plan import MESH_ORDER, Plan


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh | None:
    """A mesh of the axes that are larger than one; None on a single rank, which needs no communication."""
    if plan.world_size != world_size:
        raise InputError(f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but there are {world_size}")
    axes = {name: size for name in MESH_ORDER if (size := getattr(plan.axes, name)) > 1}
    if not axes:
        return None
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
