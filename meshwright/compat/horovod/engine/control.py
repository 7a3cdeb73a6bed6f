"""The connections over which ranks negotiate: each rank is connected to rank 0. They listen on the loopback address if
all ranks are on one machine. A rank that dies closes its connection, which rank 0 notices at once."""

import hmac
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from meshwright.compat.horovod.engine.frames import FrameReader, send_frame
from meshwright.compat.horovod.engine.rendezvous import Placement
from meshwright.compat.horovod.exceptions import HorovodInternalError
from meshwright.processes.loopback import ADDRESS
from meshwright.processes.network.own_user import accept_own_user
from meshwright.processes.output import print_to_user
from meshwright.processes.token.signed_store import SignedStore, read, write

_POLL_S, _ACCEPT_S, _GREETING_S = 0.01, 0.2, 10.0
_LONGEST_GREETING = 1000
_open_links: "weakref.WeakSet[ControlLinks]" = weakref.WeakSet()


class ControlLinks:
    """The connections of one rank, by the rank at their other end: of rank 0 to all others, of the others to rank 0."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self.connections = connections
        self.readers = {rank: FrameReader(connection) for rank, connection in connections.items()}
        _open_links.add(self)

    def send(self, rank: int, frame: dict[str, object]) -> None:
        """Sends a frame. Nothing happens if the other rank is gone; reading tells that."""
        if rank in self.connections:
            with suppress(OSError):
                send_frame(self.connections[rank], frame)

    def drop(self, rank: int) -> None:
        connection = self.connections.pop(rank, None)
        self.readers.pop(rank, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for rank in list(self.connections):
            self.drop(rank)


def connect(placement: Placement, timeout_s: float, problem: Callable[[], str | None]) -> ControlLinks:
    """Connects this rank. Returns when all ranks are connected. `problem` is asked meanwhile, and returns why the ranks
    can never be connected."""
    store, rank = placement.store, placement.rank
    if placement.size == 1:
        return ControlLinks({})
    assert store is not None
    if rank == 0:
        return _accept_all(store, placement.size, placement.one_machine, timeout_s, problem)
    deadline = time.monotonic() + timeout_s
    while not store.check(["control"]):
        _check(problem)
        if time.monotonic() > deadline:
            raise HorovodInternalError(f"rank 0 did not call hvd.init() within {timeout_s:g} s")
        time.sleep(_POLL_S)
    address, port, token = read(store, "control").decode().rsplit(":", 2)
    try:
        connection = socket.create_connection((address, int(port)), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_frame(connection, [_secret(store) or token, rank])
        links = ControlLinks({0: connection})
        links.readers[0].one()
    except OSError as error:
        raise HorovodInternalError(f"rank {rank} could not connect to rank 0 at {address}:{port}: {error}") from error
    connection.settimeout(None)
    return links


def _check(problem: Callable[[], str | None]) -> None:
    if text := problem():
        raise HorovodInternalError(text)


def _accept_all(
    store: dist.Store, size: int, one_machine: bool, timeout_s: float, problem: Callable[[], str | None]
) -> ControlLinks:
    secret = _secret(store)
    token = "" if secret else secrets.token_hex(16)  # in a store on the loopback address
    deadline = time.monotonic() + timeout_s
    connections: dict[int, socket.socket] = {}
    with socket.create_server((ADDRESS if one_machine else _own_address(), 0)) as listener:
        address, port = listener.getsockname()[:2]
        write(store, "control", f"{address}:{port}:{token}")
        while len(connections) < size - 1:
            _check(problem)
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, size)) - connections.keys())
                raise HorovodInternalError(f"ranks {missing} did not call hvd.init() within {timeout_s:g} s")
            listener.settimeout(_ACCEPT_S)
            try:
                accepted = accept_own_user(listener)
            except TimeoutError:
                continue
            if accepted is None:
                continue
            connection, (host, *_) = accepted
            peer = _greeted_rank(connection, secret or token)
            if peer is None or peer not in range(1, size) or peer in connections:
                print_to_user(f"refused: a process on {host} connected to rank 0 without the token of this run")
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            connections[peer] = connection
    links = ControlLinks(connections)
    for peer in connections:
        links.send(peer, {"connected": True})
    return links


def _secret(store: dist.Store) -> str:
    """Returns a text that only ranks of this run know; empty if their store is one of this machine."""
    return store.secret("control") if isinstance(store, SignedStore) else ""


def _greeted_rank(connection: socket.socket, token: str) -> int | None:
    """Returns the rank that a new connection says it is; None if it does not know the token."""
    connection.settimeout(_GREETING_S)
    try:
        sent, rank = FrameReader(connection, _LONGEST_GREETING).one()
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_of_this_run = hmac.compare_digest(str(sent).encode(errors="replace"), token.encode())
    return rank if is_of_this_run and type(rank) is int else None


def _own_address() -> str:
    """The address by which other machines reach this one."""
    return socket.gethostbyname(socket.gethostname())


def _close_in_forked_process() -> None:
    """A worker of a data loader must not keep the connections of its parent open: they tell that the parent lives."""
    for links in list(_open_links):
        for connection in links.connections.values():
            connection.close()


os.register_at_fork(after_in_child=_close_in_forked_process)
