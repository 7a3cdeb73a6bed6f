"""The state of torch's rendezvous as JSON in a store, signed with the token of the run. Torch itself would store a
pickle, and execute what a stranger who reaches the store has written there. What a stranger writes, or repeats from an
earlier state, is refused, and replaced by the last state that this machine has seen.

It uses the private classes `_RendezvousState` and `_NodeDesc` of torch, seen to work on torch 2.13.
"""

import json
import pickle
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

from meshwright.processes.output import print_to_user
from meshwright.processes.token.signed_store import SignedStore, StrangerError

_KEY = "rendezvous"
_NOTHING = "null"  # a store waits for keys that do not exist
_RESTORES = 50  # how often a state of strangers is replaced, or waited for to be replaced, before this machine gives up
_RESTORE_S = 0.2


class JsonBackend(RendezvousBackend):
    """Keeps the state of a rendezvous in a store. While `is_joining`, `check` is called in the main thread before each
    access, and may raise an exception to end the wait for other machines. `look` is called whenever the state is read.
    `round` is the number of the round that was seen last."""

    def __init__(self, store: SignedStore, check: Callable[[], None], look: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._check = check
        self._look = look
        self.round = 0
        self.is_joining = False
        self._lock = threading.Lock()  # torch reads and writes the state in two threads
        self._last: bytes | None = None  # what was stored when the state was last seen
        self._last_number = -1
        self._call(store.compare_set, _KEY, "", store.signed(_KEY, _NOTHING))

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._lock:
            self._call(self._look)
            # Whoever can reach the store may have deleted the key: what was there last is put back.
            if self._last is not None and not self._call(self._store.check, [_KEY]):
                self._call(self._store.compare_set, _KEY, "", self._last)
            return self._decode(self._call(self._store.get, _KEY))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        content = pickle.loads(state)  # pickled by torch in this process
        with self._lock:
            before = token if isinstance(token, bytes) else self._store.signed(_KEY, _NOTHING).encode()
            new = self._store.signed(_KEY, _to_json(content, self._number_of(before) + 1)).encode()
            stored = self._call(self._store.compare_set, _KEY, before, new)
            decoded = self._decode(stored)
        return None if decoded is None else (*decoded, stored == new)

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        if self.is_joining and threading.current_thread() is threading.main_thread():
            self._check()
        try:
            return operation(*arguments)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store of the rendezvous does not answer") from error

    def _decode(self, stored: bytes) -> tuple[bytes, Token] | None:
        """Returns the state, or the one that replaces it if no machine of this run has written it."""
        for _ in range(_RESTORES):
            try:
                number = self._number_of(stored)
                if number < self._last_number:
                    raise StrangerError("a stranger has repeated an earlier state of the rendezvous")
                raw = json.loads(self._store.checked(_KEY, stored))
                break
            except StrangerError as error:
                stored = self._replace(stored, error)
        else:
            raise RendezvousStateError(
                "a stranger writes the state of the rendezvous, so that the machines cannot meet"
            )
        self._last, self._last_number = stored, number
        if raw is None:
            return None
        state = _from_json(raw)
        self.round = state.round
        return pickle.dumps(state), stored

    def _replace(self, stored: bytes, error: StrangerError) -> bytes:
        print_to_user(f"refused: {error}")
        if self._last is not None:
            return bytes(self._call(self._store.compare_set, _KEY, stored, self._last))
        time.sleep(_RESTORE_S)  # another machine has seen the state, and replaces it
        return bytes(self._call(self._store.get, _KEY))

    def _number_of(self, stored: bytes) -> int:
        """Returns how many states there were before this one. Raises a `StrangerError` if a stranger has written it."""
        raw = json.loads(self._store.checked(_KEY, stored))
        return 0 if raw is None else int(raw["number"])


def _to_json(state: _RendezvousState, number: int) -> str:
    raw = {
        "number": number,
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline.isoformat() if state.deadline else None,
        "closed": state.closed,
        "participants": sorted([_node(node), rank] for node, rank in state.participants.items()),
        "wait_list": sorted(map(_node, state.wait_list)),
        "redundancy_list": sorted(map(_node, state.redundancy_list)),
        "last_heartbeats": sorted([_node(node), time.isoformat()] for node, time in state.last_heartbeats.items()),
    }
    return json.dumps(raw)


def _from_json(raw: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    state.round = int(raw["round"])
    state.complete = bool(raw["complete"])
    state.deadline = datetime.fromisoformat(raw["deadline"]) if raw["deadline"] else None
    state.closed = bool(raw["closed"])
    state.participants = {_read_node(node): int(rank) for node, rank in raw["participants"]}
    state.wait_list = set(map(_read_node, raw["wait_list"]))
    state.redundancy_list = set(map(_read_node, raw["redundancy_list"]))
    state.last_heartbeats = {_read_node(node): datetime.fromisoformat(time) for node, time in raw["last_heartbeats"]}
    return state


def _node(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _read_node(raw: list[Any]) -> _NodeDesc:
    address, pid, number = raw
    return _NodeDesc(str(address), int(pid), int(number))
