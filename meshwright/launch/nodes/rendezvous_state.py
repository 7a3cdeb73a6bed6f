"""The state of torch's rendezvous as JSON in a store. Torch itself would store a pickle, and execute what a stranger
who reaches the store has written there. A stranger can still disturb the run.

It uses the private classes `_RendezvousState` and `_NodeDesc` of torch, seen to work on torch 2.13.
"""

import json
import pickle
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

_KEY = "rendezvous"
_NOTHING = "null"  # a store waits for keys that do not exist


class JsonBackend(RendezvousBackend):
    """Keeps the state of a rendezvous in a store. While `is_joining`, `check` is called in the main thread before each
    access, and may raise an exception to end the wait for other machines. `round` is the number of the round that was
    seen last."""

    def __init__(self, store: dist.Store, check: Callable[[], None]) -> None:
        self._store = store
        self._check = check
        self.round = 0
        self.is_joining = False
        self._call(store.compare_set, _KEY, "", _NOTHING)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._decode(self._call(self._store.get, _KEY))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        text = _to_json(pickle.loads(state))  # pickled by torch in this process
        before = token.decode() if isinstance(token, bytes) else _NOTHING
        stored = self._call(self._store.compare_set, _KEY, before, text)
        decoded = self._decode(stored)
        return None if decoded is None else (*decoded, stored.decode() == text)

    def _call(self, operation: Callable[..., bytes], *arguments: str) -> bytes:
        if self.is_joining and threading.current_thread() is threading.main_thread():
            self._check()
        try:
            return operation(*arguments)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store of the rendezvous does not answer") from error

    def _decode(self, stored: bytes) -> tuple[bytes, Token] | None:
        if stored == _NOTHING.encode():
            return None
        try:
            state = _from_json(stored)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RendezvousStateError("the state of the rendezvous is damaged") from error
        self.round = state.round
        return pickle.dumps(state), stored


def _to_json(state: _RendezvousState) -> str:
    raw = {
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


def _from_json(text: bytes) -> _RendezvousState:
    raw = json.loads(text)
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
