"""Process sets: operations among some of the ranks. `hvd.init(process_sets=[…])` makes them at the start,
`add_process_set` and `remove_process_set` later; all ranks call these together."""

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.compat.horovod.engine import requests
from meshwright.compat.horovod.engine.operation import Operation
from meshwright.compat.horovod.engine.requests import GLOBAL_SET, Request
from meshwright.compat.horovod.exceptions import MismatchError
from meshwright.compat.horovod.state import horovod


class ProcessSet:
    """Some of the ranks. It can be used once `process_set_id` is set, by `hvd.init` or `add_process_set`."""

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self.ranks: list[int] | None = None
        if hasattr(ranks_or_comm, "Get_rank") and hasattr(ranks_or_comm, "allgather"):
            self.mpi_comm = ranks_or_comm
        elif isinstance(ranks_or_comm, Iterable) and all(type(rank) is int for rank in ranks_or_comm):
            self.ranks = sorted(ranks_or_comm)
        else:
            raise ValueError(
                f"ProcessSet({ranks_or_comm!r}): give a list of ranks, or a communicator of mpi4py to hvd.init()"
            )

    def size(self) -> int | None:
        """The number of ranks; None before the process set exists."""
        return None if self.process_set_id is None else len(registered_ranks(self.process_set_id))

    def rank(self) -> int | None:
        """The position of this rank in the process set; None before the process set exists."""
        if self.process_set_id is None:
            return None
        ranks, rank = registered_ranks(self.process_set_id), horovod.placement.rank
        if rank not in ranks:
            raise ValueError(f"rank {rank} is not in the process set of ranks {list(ranks)}")
        return ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this rank is in the process set."""
        if self.process_set_id == GLOBAL_SET:
            return True
        return None if self.ranks is None else horovod.placement.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL_SET


def registered_ranks(process_set_id: int | None) -> tuple[int, ...]:
    """Returns the global ranks of a process set that exists."""
    ranks = None if process_set_id is None else horovod.engine.process_sets.get(process_set_id)
    if ranks is None:
        raise ValueError(
            f"there is no process set {process_set_id}: name it in hvd.init(process_sets=[...]), or call"
            " hvd.add_process_set"
        )
    return ranks


def init_process_sets(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Makes the process sets that are given to `hvd.init`."""
    global_process_set.ranks = list(horovod.engine.process_sets[GLOBAL_SET])
    if process_sets is None or isinstance(process_sets, str):
        if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
            raise ValueError(f"hvd.init(process_sets={process_sets!r}): give a list of ProcessSet, or 'dynamic'")
        return
    for position, process_set in enumerate(process_sets):
        try:
            add_process_set(process_set)
        except ValueError as error:
            raise ValueError(f"hvd.init(): entry {position} of process_sets cannot be made: {error}") from None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set, and returns it. All ranks call this with the same ranks, those outside of it, too."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    size = horovod.placement.size
    if process_set.ranks is None:
        members = horovod_ranks_in(process_set.mpi_comm)
        process_set.ranks = sorted(members)
    ranks = tuple(process_set.ranks)
    if len(set(ranks)) != len(ranks) or not ranks or not all(0 <= rank < size for rank in ranks):
        raise ValueError(f"{process_set}: name each rank from 0 to {size - 1} at most once, and at least one rank")
    request = Request(requests.ADD_PROCESS_SET, "add", ranks=ranks)
    try:
        number = horovod.run(Operation(request)).value
    except MismatchError as error:
        raise ValueError(str(error)) from None
    assert isinstance(number, int)
    process_set.process_set_id = number
    return process_set


def horovod_ranks_in(communicator: Any) -> list[int]:
    """Returns the ranks of this job that are in a communicator of mpi4py."""
    return list(communicator.allgather(horovod.placement.rank))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set, and returns whether it existed. All ranks call this. The set of all ranks stays."""
    number = process_set.process_set_id
    if number is None or number == GLOBAL_SET:
        return False
    process_set.process_set_id = None
    request = Request(requests.REMOVE_PROCESS_SET, "remove", root=number)
    try:
        horovod.run(Operation(request))
    except MismatchError:
        return False
    return True
