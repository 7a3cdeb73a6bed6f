"""A reducer by the name that a plan gives it, and what `auto` is on the ranks that are there."""

import torch
import torch.distributed as dist

from meshwright.collectives.native import Native
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.scheduled import Scheduled
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.shared_memory import storages
from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.shared_memory.two_level import TwoLevelMemory, machines_of
from meshwright.errors import InputError
from meshwright.plan import Algorithm


def make_reducer(
    algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device, size_bytes: int = 0
) -> tuple[Reducer, str | None]:
    """All ranks of the group ask together, for gradients of `size_bytes` in all. With a word why, where `auto` could
    have been faster than it is."""
    if algorithm == "native" or group.size() == 1:
        return Native(group), None
    if device.type != "cpu":
        if algorithm == "auto":
            return Native(group), None
        raise InputError(
            f"plan.gradients.algorithm is {algorithm}, which combines gradients of CPU ranks, but these are on"
            f" {device.type}: choose native"
        )
    machines = machines_of(group)
    if algorithm == "auto":
        try:
            return _in_memory(group, machines, size_bytes), None
        except InputError as reason:
            return Native(group), str(reason)
    if algorithm == "shared_memory":
        return _in_memory(group, machines, size_bytes), None
    assert algorithm in SCHEDULES
    return Scheduled(group, build(algorithm, group.size(), _in_order(machines, algorithm))), None


def _in_memory(group: dist.ProcessGroup, machines: list[list[int]], size_bytes: int) -> Reducer:
    (here,) = [machine for machine in machines if group.rank() in machine]
    needed, free = len(here) * size_bytes, storages.free_bytes()
    said: list[str] = [""] * group.size()
    mine = (
        f"{storages.SHARED} has {free / 2**20:.0f} MiB free, and {len(here)} ranks need {needed / 2**20:.0f} MiB there"
    )
    dist.all_gather_object(said, mine if needed > free else "", group=group)
    if reason := next(filter(None, said), ""):
        raise InputError(
            f"gradients cannot be combined in shared memory: {reason} (a container gets more with --shm-size)"
        )
    return SharedMemory(group) if len(machines) == 1 else TwoLevelMemory(group, machines)


def _in_order(machines: list[list[int]], algorithm: str) -> list[int]:
    """How many ranks each machine has, where they are numbered machine by machine."""
    numbered = [rank for machine in machines for rank in machine]
    if algorithm == "two_level" and numbered != sorted(numbered):
        raise InputError(
            f"plan.gradients.algorithm is two_level, which wants ranks that are numbered machine by machine, but the"
            f" machines have {machines}: start them so, or choose ring"
        )
    return [len(machine) for machine in machines]
