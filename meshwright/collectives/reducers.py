"""Makes the reducer that a plan names. For `auto` it chooses one by the devices and machines that the ranks run on."""

from dataclasses import replace

import torch
import torch.distributed as dist

from meshwright.collectives.native import NativeReducer
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.scheduled import ScheduledReducer
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.schedule import Schedule, placed
from meshwright.collectives.shared_memory import storages
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.shared_memory.segment import missing_on_this_system
from meshwright.collectives.shared_memory.two_level import TwoLevelMemoryReducer, machines_of
from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.numbers.units import bytes_text
from meshwright.plan_fields.groups import Algorithm


def make_reducer(
    algorithm: Algorithm, group: dist.ProcessGroup, device: torch.device, size_bytes: int = 0
) -> tuple[Reducer, str | None]:
    """Returns (reducer, reason). The reason says why `auto` cannot use the shared memory of CPU ranks; it is None in
    all other cases. `size_bytes` is the size of all gradients. All ranks of the group call this together."""
    if algorithm == "native" or group.size() == 1:
        return NativeReducer(group), None
    if device.type != "cpu":
        assert algorithm == "auto", algorithm  # the table of rules refuses the others
        return NativeReducer(group), None
    machines = machines_of(group)
    if algorithm == "auto":
        try:
            return _shared_memory_reducer(group, machines, size_bytes), None
        except InputError as reason:
            return NativeReducer(group), str(reason)
    if algorithm == "shared_memory":
        return _shared_memory_reducer(group, machines, size_bytes), None
    assert algorithm in SCHEDULES
    return ScheduledReducer(group, _schedule_on(machines, algorithm)), None


def _shared_memory_reducer(group: dist.ProcessGroup, machines: list[list[int]], size_bytes: int) -> Reducer:
    if reason := missing_on_this_system():
        raise InputError(f"gradients cannot be combined in shared memory: {reason}")
    (local_ranks,) = [machine for machine in machines if group.rank() in machine]
    needed, free = len(local_ranks) * size_bytes, storages.free_bytes()
    problem = (
        f"{storages.SHARED} has {bytes_text(free)} free, and {len(local_ranks)} ranks need {bytes_text(needed)} there"
    )
    if reason := next(filter(None, all_gather_values(problem if needed > free else "", group)), ""):
        raise InputError(
            f"gradients cannot be combined in shared memory: {reason} (a container gets more with --shm-size)"
        )
    return SharedMemoryReducer(group) if len(machines) == 1 else TwoLevelMemoryReducer(group, machines)


def _schedule_on(machines: list[list[int]], algorithm: str) -> Schedule:
    """Returns the schedule for ranks on these machines. `two_level` is built for ranks that are numbered machine by
    machine; if they are not, because the process group was made by someone else, it is moved to the ranks of each
    machine."""
    ranks = [rank for machine in machines for rank in machine]
    schedule = build(algorithm, len(ranks), [len(machine) for machine in machines])
    if algorithm != "two_level" or ranks == sorted(ranks):
        return schedule
    return replace(schedule, rounds=tuple(placed(schedule, ranks, 0)))
