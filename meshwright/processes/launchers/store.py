"""Connects ranks that another launcher has started to their store. Rank 0 serves it, unless the launcher does. Ranks of
one machine use the loopback address only."""

import errno
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import CollectiveError, InputError
from meshwright.files.trust import sign
from meshwright.processes.launchers.launched_rank import LaunchedRank
from meshwright.processes.launchers.store_place import StorePlace
from meshwright.processes.loopback import ADDRESS, connect_store, serve_store
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.processes.token.admission import enter
from meshwright.processes.token.run_token import find_token
from meshwright.processes.token.signed_store import SignedStore

_POLL_S = 0.05
_CONNECT_S = 10.0  # to a port on this machine at which rank 0 listens already
_LAUNCH = "launch"  # the key in the store of a text that only this store has


def open_store(rank: LaunchedRank, place: StorePlace, timeout_s: float) -> SignedStore:
    """Returns the store of the ranks, when this rank and rank 0 have shown each other that they have the token of the
    run. On rank 0, it returns when all ranks have joined."""
    if place.file is not None:
        return _open_by_file(rank, place.file, timeout_s)
    token = find_token(rank.is_on_one_machine)
    if place.is_served or rank.rank != 0:
        host = ADDRESS if rank.is_on_one_machine and not place.is_served else place.host
        store: dist.Store = connect_store(host, place.port, timedelta(seconds=timeout_s))
    else:
        store = _serve(rank, place)
    if place.is_served:  # such a store outlives a restart
        store = dist.PrefixStore(f"attempt{rank.attempt}", store)
    return enter(store, token, rank.rank, rank.size, rank.launcher, timeout_s)


def store_of_own_user(store: SignedStore, rank: int, timeout_s: float) -> SignedStore:
    """Returns a store for the process groups of ranks on one machine, which rank 0 serves and where no other user of
    the machine can connect. `store` is that of their launcher, where everybody can, and where torch's values are not
    signed."""
    if rank == 0:
        served, port = serve_store()
        store.write("port", str(port))
        return store.moved_to(served)
    return store.moved_to(connect_store(ADDRESS, int(store.read("port")), timedelta(seconds=timeout_s)))


def _open_by_file(rank: LaunchedRank, file: Path, timeout_s: float) -> SignedStore:
    if rank.rank != 0:
        store, token = _store_of_file(file, timeout_s)
        return enter(store, token.encode(), rank.rank, rank.size, rank.launcher, timeout_s)
    store, port = serve_store()
    token = secrets.token_hex(16)
    store.set(_LAUNCH, _launch_of(token))
    _write_port(file, port, token)
    try:
        return enter(store, token.encode(), 0, rank.size, rank.launcher, timeout_s)
    finally:
        file.unlink(missing_ok=True)


# ---- the port in a file


def _launch_of(token: str) -> str:
    return sign(token.encode(), b"launch")


def _write_port(file: Path, port: int, token: str) -> None:
    """Writes the port and the token for the other ranks of this machine; only this user can read them."""
    draft = file.with_name(f"{file.name}-{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump({"port": port, "token": token}, stream)
    draft.replace(file)


def _store_of_file(file: Path, timeout_s: float) -> tuple[dist.Store, str]:
    """Waits until rank 0 has written its port, and connects to it. Returns the store and the token. A file of an
    earlier launch, whose rank 0 was killed before it could remove it, has the port of no store, or of that of another
    launch."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, KeyError, dist.DistError):
            content = json.loads(file.read_text())
            address = (ADDRESS, int(content["port"]))
            socket.create_connection(address, _CONNECT_S).close()  # a TCPStore would try again for long
            store = connect_store(*address, timedelta(seconds=min(timeout_s, _CONNECT_S)))
            token = str(content["token"])
            if store.check([_LAUNCH]) and store.get(_LAUNCH) == _launch_of(token).encode():
                store.set_timeout(timedelta(seconds=timeout_s))
                return store, token
        time.sleep(_POLL_S)
    raise CollectiveError(
        f"rank 0 did not write its port to {file} within {timeout_s:g} s: the ranks of a launch on one machine find"
        " each other there. If they do not see the same folder or the same processes, as in containers, set"
        " MASTER_ADDR and MASTER_PORT for all of them"
    )


# ---- a port that is known before


def _serve(rank: LaunchedRank, place: StorePlace) -> dist.TCPStore:
    addresses = [ADDRESS] if rank.is_on_one_machine else _addresses_for_others(place.host)
    host, listener = _listen(addresses, place.port)
    admit_own_user_only()
    return dist.TCPStore(host, place.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _listen(addresses: list[str], port: int) -> tuple[str, socket.socket]:
    """Listens on the first of the addresses that this machine has, or on all addresses if it has none of them, as
    behind a service of Kubernetes. Returns the address under which this process reaches it, too."""
    try:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                return address, socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        everywhere = socket.create_server(("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=dual)
    except OSError as error:
        raise InputError(
            f"rank 0 cannot listen on port {port}: {error.strerror or error}; set MASTER_PORT to a free port for all"
            " ranks"
        ) from error
    return ADDRESS, everywhere


def _addresses_for_others(host: str) -> list[str]:
    """Returns the addresses of the host, without loopback addresses, which a machine often has for its own name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [address for address in addresses if not address.startswith("127.") and address != "::1"]
