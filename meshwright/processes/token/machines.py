"""How the machines of `train --nodes` make sure that they have the same token. Machine 0 serves their store, and writes
a greeting there that has a random session and is signed with the token. The session and the token give the key that
signs everything that the launchers and their ranks write afterwards."""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.files.trust import is_signed_by, sign
from meshwright.processes.environment import SESSION, store_address
from meshwright.processes.loopback import connect_store
from meshwright.processes.output import print_to_user
from meshwright.processes.token.admission import read_message, shown_name
from meshwright.processes.token.run_token import find_token, other_token
from meshwright.processes.token.signed_store import SignedStore

_GREETING, _REFUSALS = "greeting", "refusals"
_POLL_S = 0.2
_REFUSED_S = 20.0  # how long a machine waits for another greeting: a stranger may have replaced it


class MachinesStore(SignedStore):
    """The signed part of the store that the launchers of several machines, and their ranks, have in common."""

    def __init__(self, store: dist.Store, token: bytes, session: str) -> None:
        super().__init__(store, sign(token, f"machines\0{session}".encode()).encode(), "machines")
        self.session = session


class Greeter:
    """Machine 0: greets the others. `look` names who had another token, and restores the greeting if a stranger has
    replaced it; it is called again and again."""

    def __init__(self, store: dist.Store, token: bytes) -> None:
        session = secrets.token_hex(16)
        greeting = {"session": session, "signature": sign(token, _greeting(session))}
        self._store, self._greeting = store, json.dumps(greeting)
        self._lock = threading.Lock()
        self.signed = MachinesStore(store, token, session)
        store.set(_GREETING, self._greeting)

    def look(self) -> None:
        with self._lock:
            if not self._store.check([_GREETING]) or self._store.get(_GREETING) != self._greeting.encode():
                print_to_user("refused: somebody without the token of this run replaced the greeting of node 0")
                self._store.set(_GREETING, self._greeting)
            while True:
                try:
                    machine, number = read_message(self._store.queue_pop(_REFUSALS, block=False), "machine", "number")
                except dist.QueueEmptyError:
                    return
                name = shown_name(f"{machine} (--node-rank {number})" if machine else "a process that is no machine")
                print_to_user(f"refused: {name} came without the token of this run")


def read_greeting(
    store: dist.Store, token: bytes, node_rank: int, place: str, check: Callable[[], None]
) -> MachinesStore:
    """Returns the signed store, when machine 0 has shown that it has the token. `place` is the address of the store."""
    machine, deadline, is_refused = socket.gethostname(), time.monotonic() + _REFUSED_S, False
    while time.monotonic() < deadline:
        check()
        if store.check([_GREETING]):
            session, signature = read_message(store.get(_GREETING), "session", "signature")
            if is_signed_by(token, _greeting(session), signature):
                return MachinesStore(store, token, session)
            if not is_refused:
                print_to_user(f"{place}: the machine there has another token than this one")
                store.queue_push(_REFUSALS, json.dumps({"machine": machine, "number": str(node_rank)}))
                is_refused = True
        time.sleep(_POLL_S)
    if is_refused:
        raise InputError(
            f"{place}: machine 0 has another token than {machine} (--node-rank {node_rank}): {other_token()}"
        )
    raise InputError(f"{place}: the store there is not that of a `meshwright train --nodes` command")


def connect_launcher_store(timeout_s: float) -> dist.Store:
    """Connects a rank to the store of its launcher: to the signed part if the launcher is one of several machines."""
    store = connect_store(*store_address(), timedelta(seconds=timeout_s))
    session = os.environ.get(SESSION)
    return store if session is None else MachinesStore(store, find_token(False), session)


def _greeting(session: str) -> bytes:
    return f"greeting\0{session}".encode()
