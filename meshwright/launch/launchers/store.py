"""Connects ranks that another launcher has started to their store. Rank 0 serves it, unless the launcher does. Ranks of
one machine use the loopback address only."""

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import CollectiveError, InputError
from meshwright.launch.launchers.launched_rank import LaunchedRank
from meshwright.launch.launchers.store_place import StorePlace
from meshwright.launch.loopback import ADDRESS, connect_store, serve_store

_POLL_S = 0.05
_CONNECT_S = 10.0  # to a port on this machine at which rank 0 listens already
_MOST_NAMED = 8


def open_store(rank: LaunchedRank, place: StorePlace, timeout_s: float) -> dist.Store:
    """Returns the store of the ranks. On rank 0, it returns when all ranks have connected."""
    timeout = timedelta(seconds=timeout_s)
    if place.file is not None:
        if rank.rank != 0:
            return _arrived(_store_of_file(place.file, timeout_s), rank.rank)
        store, port = serve_store()
        store.set("token", token := secrets.token_hex(16))
        _write_port(place.file, port, token)
    elif place.is_served or rank.rank != 0:
        host = ADDRESS if rank.is_on_one_machine and not place.is_served else place.host
        store = connect_store(host, place.port, timeout)
    else:
        store = _serve(rank, place)
    try:
        # A store that the launcher serves outlives a restart.
        arrivals = dist.PrefixStore(f"attempt{rank.attempt}", store) if place.is_served else store
        _arrived(arrivals, rank.rank)
        if rank.rank == 0:
            _wait_for_ranks(arrivals, rank, timeout_s)
    finally:
        if place.file is not None:
            place.file.unlink(missing_ok=True)
    return store


def _arrived(store: dist.Store, rank: int) -> dist.Store:
    store.set(f"arrived/{rank}", "1")
    return store


def _wait_for_ranks(store: dist.Store, rank: LaunchedRank, timeout_s: float) -> None:
    keys = {other: f"arrived/{other}" for other in range(rank.size)}
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing = [other for other, key in keys.items() if not store.check([key])]
        raise CollectiveError(
            f"rank 0 waited {timeout_s:g} s for the {rank.size} ranks of {rank.launcher}, and {describe_ranks(missing)}"
            " did not join"
        ) from error


def describe_ranks(ranks: Iterable[int]) -> str:
    """Returns `rank 3`, `ranks 3 and 5`, or the first ones and how many more there are."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > _MOST_NAMED:
        return f"ranks {', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


# ---- the port in a file


def _write_port(file: Path, port: int, token: str) -> None:
    """Writes the port for the other ranks of this machine, and a random text that only this store has."""
    draft = file.with_name(f"{file.name}-{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump({"port": port, "token": token}, stream)
    draft.replace(file)


def _store_of_file(file: Path, timeout_s: float) -> dist.Store:
    """Waits until rank 0 has written its port, and connects to it. A file of an earlier launch, whose rank 0 was killed
    before it could remove it, has the port of no store, or of one without its token."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, KeyError, dist.DistError):
            content = json.loads(file.read_text())
            address = (ADDRESS, int(content["port"]))
            socket.create_connection(address, _CONNECT_S).close()  # a TCPStore would try again for long
            store = connect_store(*address, timedelta(seconds=min(timeout_s, _CONNECT_S)))
            if store.check(["token"]) and store.get("token").decode() == content["token"]:
                store.set_timeout(timedelta(seconds=timeout_s))
                return store
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
