"""How ranks find each other: through a store that their launcher serves, or rank 0. Each `hvd.init()` has a place of
its own in it, so that a later one reads nothing of an earlier one."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from meshwright.compat.horovod.variables import HorovodVariables
from meshwright.processes.launchers.launched_rank import LaunchedRank
from meshwright.processes.launchers.store import open_store, store_of_own_user
from meshwright.processes.launchers.store_place import StorePlace
from meshwright.processes.loopback import ADDRESS, connect_store, serve_store
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.processes.token.signed_store import SignedStore


@dataclass(frozen=True)
class Placement:
    """Which rank this process is. `local` counts the ranks of this machine, `cross` the machines. `store` is None for
    a single rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    store: dist.Store | None

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def place(variables: HorovodVariables, attempt: str) -> Placement:
    """Returns the rank that the launcher's variables describe. `attempt` is the same on all ranks, and differs between
    two calls of `hvd.init()`."""
    store: dist.Store | None = None
    if variables.size > 1 and variables.store is not None:
        store = _part(_store_at(variables, variables.store), attempt)
    return Placement(
        *(variables.rank, variables.size, variables.local_rank, variables.local_size),
        *(variables.cross_rank, variables.cross_size, store),
    )


def place_among(placement: Placement, ranks: Sequence[int]) -> Placement:
    """Returns the placement among some of the ranks, which are numbered anew in their order."""
    if placement.rank not in ranks:
        raise ValueError(
            f"hvd.init(comm={list(ranks)}) was called on rank {placement.rank}, which is not among these ranks: call it"
            " only on them"
        )
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < placement.size for rank in ranks):
        raise ValueError(f"hvd.init(comm={list(ranks)}): name each rank from 0 to {placement.size - 1} at most once")
    rank, size = ranks.index(placement.rank), len(ranks)
    place_of_ranks = f"ranks {','.join(map(str, ranks))}"
    store = _part(placement.store, place_of_ranks) if placement.store is not None else None
    if placement.one_machine:
        return Placement(rank, size, rank, size, 0, 1, store)
    machines = [other // placement.local_size for other in ranks]
    neighbours = [position for position, machine in enumerate(machines) if machine == machines[rank]]
    order = list(dict.fromkeys(machines))
    return Placement(
        *(rank, size, neighbours.index(rank), len(neighbours)),
        *(order.index(machines[rank]), len(order), store),
    )


def place_in_communicator(communicator: Any, attempt: str, timeout_s: float) -> Placement:
    """Returns the placement in a communicator of mpi4py. Its ranks have to be on one machine, because they find each
    other through a store on the loopback address."""
    rank, size = communicator.Get_rank(), communicator.Get_size()
    hosts = communicator.allgather(socket.gethostname())
    if len(set(hosts)) > 1:
        raise ValueError(
            f"hvd.init(comm): the communicator has ranks on {', '.join(sorted(set(hosts)))}, and only those of one"
            " machine can be joined by a communicator: call hvd.init() without it, and set MASTER_ADDR and MASTER_PORT"
        )
    port = communicator.bcast(_served_port() if rank == 0 else None, 0)
    store = dist.PrefixStore(f"communicator {attempt}", _store(ADDRESS, port, False, timeout_s))
    return Placement(rank, size, rank, size, 0, 1, store)


def _part(store: dist.Store, name: str) -> dist.Store:
    return store.part(name) if isinstance(store, SignedStore) else dist.PrefixStore(name, store)


def _store_at(variables: HorovodVariables, place: StorePlace) -> dist.Store:
    if variables.launched is not None:
        return _launched_store(variables.launched, place, variables.timeout_s)
    return _store(place.host, place.port, not place.is_served and variables.rank == 0, variables.timeout_s)


@cache
def _launched_store(rank: LaunchedRank, place: StorePlace, timeout_s: float) -> dist.Store:
    store = open_store(rank, place, timeout_s)
    is_open_to_others = place.is_served and rank.is_on_one_machine
    return store_of_own_user(store, rank.rank, timeout_s) if is_open_to_others else store


@cache
def _store(address: str, port: int, serves: bool, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    if not serves:
        return connect_store(address, port, timeout)
    admit_own_user_only()
    listener = socket.create_server((address, port))
    store: dist.Store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    return store


@cache
def _served_port() -> int:
    store, port = serve_store()
    _served.append(store)
    return port


_served: list[dist.Store] = []  # as long as the process lives
