"""How machines find each other: machine 0 serves a store at the address of `--rendezvous`, and only there; torch's
rendezvous counts the machines in it; the ranks use the same store."""

import errno
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from meshwright.errors import InputError, RankError
from meshwright.processes.loopback import connect_store
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.processes.nodes.address import Address, NodeCount
from meshwright.processes.nodes.rendezvous_state import JsonBackend
from meshwright.processes.token.signed_store import SignedStore

_ATTEMPT_S = 1.0  # how long one attempt to reach the store may take
_LOST_S = 60.0  # how long an answer of the store may take
# How long machines wait for more of them when there are enough. A run that has lost a machine goes on after this time
# and the 15 seconds after which torch takes the machine for lost.
_LAST_CALL_S = 10.0


@dataclass(frozen=True)
class Node:
    """This machine: number `rank` of `nodes`, which meet at `address`, and train the job of this name on `local_ranks`
    ranks each."""

    rank: int
    nodes: NodeCount
    address: Address
    job: str
    local_ranks: int


class NodeRendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous, except that ranks use its own store. `node`, `backend` and `signed`, its store, are set by
    `join_rendezvous`."""

    node: Node
    backend: JsonBackend
    signed: SignedStore

    def _create_tcp_store_server(self, master_addr: Any, master_port: Any) -> Any:
        return self._store  # torch would listen on every interface of this machine

    @property
    def use_agent_store(self) -> bool:
        return True

    @property
    def round(self) -> int:
        """How many times the machines have met before."""
        return self.backend.round

    def next_rendezvous(self) -> RendezvousInfo:
        # Torch exchanges an address in its first round only: a machine that is started again would wait for it.
        address = RendezvousStoreInfo(self.node.address.host, self.node.address.port)
        self._bootstrap_store_info, self._shared_tcp_store_server = address, self._store
        self.backend.is_joining = True
        try:
            info = super().next_rendezvous()
        finally:
            self.backend.is_joining = False
        self._check_numbers(info)
        return RendezvousInfo(info.store, info.rank, info.world_size, address)

    def _check_numbers(self, info: RendezvousInfo) -> None:
        """Raises an `InputError` on all machines if two have the same number."""
        store = self.signed.part(f"round {self.round}")
        store.write(f"number of node {info.rank}", str(self.node.rank))
        numbers = [int(store.read(f"number of node {place}")) for place in range(info.world_size)]
        if repeated := sorted({number for number in numbers if numbers.count(number) > 1}):
            raise InputError(f"--node-rank {repeated[0]} was given on two machines: give each another number")


def _check_command(node: Node, store: SignedStore) -> None:
    """Raises an `InputError` if this machine's command differs from that of the machine that has come first."""
    for what, here in (("--nodes", str(node.nodes)), ("the job's name", node.job)):
        name = f"command: {what}"
        there = store.checked(name, store.compare_set(name, "", store.signed(name, here))).decode()
        if there != here:
            raise InputError(
                f"{what} is {here} here (--node-rank {node.rank}), but {there} on the machine that came first to"
                f" {node.address}: start the same command on all machines"
            )


def join_rendezvous(
    node: Node,
    store: SignedStore,
    timeout_s: float,
    check: Callable[[], None],
    look: Callable[[], None] = lambda: None,
) -> NodeRendezvous:
    """Returns the rendezvous of the machines in a store. `check` is called while it waits for other machines, and
    `look` every second, as long as it exists."""
    _check_command(node, store)
    backend = JsonBackend(store, check, look)
    handler: NodeRendezvous = NodeRendezvous.from_backend(
        run_id="meshwright",
        store=store,
        backend=backend,
        min_nodes=node.nodes.least,
        max_nodes=node.nodes.most,
        local_addr=f"{node.rank:06d} {platform.node()}",  # machines are ordered by this text
        timeout=RendezvousTimeout(join=timedelta(seconds=timeout_s), last_call=timedelta(seconds=_LAST_CALL_S)),
    )
    handler.node, handler.backend, handler.signed = node, backend, store
    return handler


def serve_store(address: Address) -> dist.TCPStore:
    """Serves a store at this address only. Raises an `InputError` if this machine cannot listen there."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        raise InputError(_why_not_served(address, error)) from None
    admit_own_user_only()
    return dist.TCPStore(
        address.host,
        address.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_LOST_S),
        master_listen_fd=listener.detach(),
    )


def _why_not_served(address: Address, error: OSError) -> str:
    where = f"--rendezvous {address}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where}: this machine (--node-rank 0) has no address {address.host}: give one of its own addresses"
    if error.errno == errno.EADDRINUSE:
        return f"{where}: port {address.port} is in use on this machine: another run may be there; choose another port"
    return f"{where}: --node-rank 0 cannot listen there: {error.strerror or error}"


def reach_store(address: Address, timeout_s: float, check: Callable[[], None]) -> dist.TCPStore:
    """Connects to the store of machine 0, and waits until it is served. `check` is called while it waits."""
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        try:
            socket.create_connection((address.host, address.port), _ATTEMPT_S).close()
            return connect_store(address.host, address.port, timedelta(seconds=_LOST_S))
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
                raise RankError(
                    f"no answer from --rendezvous {address} within train.timeout_s ({timeout_s:g} s): {reason}; is the"
                    " command with --node-rank 0 running on the machine of that address?"
                ) from None
            time.sleep(min(_ATTEMPT_S, max(0.0, deadline - time.monotonic())) / 5)
