"""How ranks that another launcher has started make sure that all of them have the token of the run, when they have
connected to their store. In the store, whose other users may be strangers:

    rank r    hello/r            = name of its machine, random nonce, HMAC(token, r ‖ number of ranks ‖ nonce)
    rank 0    welcome/r/nonce    = random session, HMAC(token, r ‖ nonce ‖ session)
    both                           key = HMAC(token, session) signs all that follows (signed_store.py)
    rank r    arrived/r            signed with that key

The nonce makes old answers of rank 0 useless, and the session everything that was ever signed before. Rank 0 names who
is refused, and goes on waiting for the rank itself, which says hello again until it is welcome. The queue `door` has
the numbers of the ranks that have written something, so that rank 0 need not look for all of them all the time.
"""

import json
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch.distributed as dist

from meshwright.errors import CollectiveError, InputError
from meshwright.files.trust import is_signed_by, sign
from meshwright.processes.output import print_to_user
from meshwright.processes.token.run_token import other_token
from meshwright.processes.token.signed_store import SignedStore, StrangerError
from meshwright.user.code import printable

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.2
_RETRY_S = 2.0  # how long a rank waits for an answer before it says hello again
_REFUSED_S = 20.0  # how long a rank that was refused waits: who has refused it may be a stranger
_DOOR = "door"
_MOST_DIGITS = 9  # of a rank
_LONGEST_MESSAGE = 1000
_LONGEST_NAME = 60
_MOST_NAMED = 8


def enter(store: dist.Store, token: bytes, rank: int, size: int, launcher: str, timeout_s: float) -> SignedStore:
    """Returns the signed part of the store, when rank 0 and this rank have shown each other that they have the token.
    On rank 0, it returns when all ranks have. `launcher` has started the ranks."""
    if rank == 0:
        return _Door(store, token, size).admit_all(launcher, timeout_s)
    return _say_hello(store, token, rank, size, timeout_s)


# ---- rank 0


class _Door:
    """Admits the other ranks."""

    def __init__(self, store: dist.Store, token: bytes, size: int) -> None:
        self._store, self._token, self._size = store, token, size
        self._session = secrets.token_hex(16)
        self._signed = _session_store(store, token, self._session)
        self._answered: dict[int, bytes] = {}
        self._refused: dict[int, str] = {}

    def admit_all(self, launcher: str, timeout_s: float) -> SignedStore:
        deadline, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        next_look = time.monotonic() + _RETRY_S
        missing = set(range(1, self._size))
        while missing:
            rank = self._next_rank()
            if rank in missing:
                missing -= self._attend([rank])
                poll_s = _FIRST_POLL_S
            elif time.monotonic() > next_look:  # a stranger may have emptied the queue
                missing -= self._attend(sorted(missing))
                next_look = time.monotonic() + _RETRY_S
            elif rank is None:
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LAST_POLL_S)
            if missing and time.monotonic() > deadline:
                raise CollectiveError(self._describe_missing(sorted(missing), launcher, timeout_s))
        return self._signed

    def _attend(self, ranks: Sequence[int]) -> set[int]:
        """Answers these ranks, and returns those of them that have arrived."""
        for rank in ranks:
            self._answer(rank)
        return {rank for rank in ranks if self._has_arrived(rank)}

    def _next_rank(self) -> int | None:
        """Returns the next number in the queue, which anybody can have written: 0 if it is none; None if the queue is
        empty."""
        try:
            text = self._store.queue_pop(_DOOR, block=False)
        except dist.QueueEmptyError:
            return None
        return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0

    def _answer(self, rank: int) -> None:
        """Answers what was last said as this rank, if it has not been answered before."""
        key = f"hello/{rank}"
        if not self._store.check([key]):
            return
        hello = self._store.get(key)
        if hello == self._answered.get(rank):
            return
        self._answered[rank] = hello
        machine, nonce, signature = read_message(hello, "machine", "nonce", "signature")
        if is_signed_by(self._token, _hello(rank, self._size, nonce), signature):
            answer = {"session": self._session, "signature": sign(self._token, _welcome(rank, nonce, self._session))}
            self._store.set(f"welcome/{rank}/{nonce}", json.dumps(answer))
            return
        name = shown_name(machine) or "a process that is no rank"
        if self._refused.get(rank) != name:
            print_to_user(f"refused: {name} came as rank {rank} without the token of this run; waiting for rank {rank}")
        self._refused[rank] = name
        self._store.set(f"refused/{rank}", nonce)

    def _has_arrived(self, rank: int) -> bool:
        key = f"arrived/{rank}"
        if not self._signed.check([key]):
            return False
        try:
            self._signed.read(key)
        except StrangerError as error:
            print_to_user(f"refused: {error}")
            self._signed.delete_key(key)
            return False
        return True

    def _describe_missing(self, missing: list[int], launcher: str, timeout_s: float) -> str:
        refused = [rank for rank in missing if rank in self._refused]
        reason = f"; {describe_ranks(refused)} had another token: {other_token()}" if refused else ""
        return (
            f"rank 0 waited {timeout_s:g} s for the {self._size} ranks of {launcher}, and {describe_ranks(missing)} did"
            f" not join{reason}"
        )


# ---- the other ranks


def _say_hello(store: dist.Store, token: bytes, rank: int, size: int, timeout_s: float) -> SignedStore:
    now = time.monotonic()
    deadline, refused_at, number = now + timeout_s, None, 0
    nonce = secrets.token_hex(16)
    answer_key, machine = f"welcome/{rank}/{nonce}", socket.gethostname()
    hello = {"machine": machine, "nonce": nonce, "signature": sign(token, _hello(rank, size, nonce))}
    while time.monotonic() < deadline and (refused_at is None or time.monotonic() < refused_at + _REFUSED_S):
        number += 1  # another text than before, which rank 0 answers again if its last answer was lost
        store.set(f"hello/{rank}", json.dumps({**hello, "number": number}))
        store.queue_push(_DOOR, str(rank))
        if _is_written(store, answer_key, min(_RETRY_S, deadline - time.monotonic())):
            session, signature = read_message(store.get(answer_key), "session", "signature")
            if is_signed_by(token, _welcome(rank, nonce, session), signature):
                signed = _session_store(store, token, session)
                signed.write(f"arrived/{rank}", "")
                store.queue_push(_DOOR, str(rank))
                return signed
            print_to_user(f"rank {rank} refused an answer in the store that was not signed with the token of this run")
            store.delete_key(answer_key)
        if refused_at is None and store.check([f"refused/{rank}"]) and store.get(f"refused/{rank}") == nonce.encode():
            refused_at = time.monotonic()
            print_to_user(f"rank {rank} on {machine} was refused: rank 0 has another token")
    if refused_at is not None:
        raise InputError(f"rank 0 refused rank {rank} on {machine}, because it has another token: {other_token()}")
    raise CollectiveError(f"rank {rank} waited {timeout_s:g} s in the store for rank 0, which did not answer")


def _is_written(store: dist.Store, name: str, timeout_s: float) -> bool:
    """Whether the store gets a value of this name in time. (Its `wait` prints warnings when it does not.)"""
    deadline, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
    while not store.check([name]):
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LAST_POLL_S)
    return True


# ---- messages


def _hello(rank: int, size: int, nonce: str) -> bytes:
    return f"hello\0{rank}\0{size}\0{nonce}".encode()


def _welcome(rank: int, nonce: str, session: str) -> bytes:
    return f"welcome\0{rank}\0{nonce}\0{session}".encode()


def _session_store(store: dist.Store, token: bytes, session: str) -> SignedStore:
    return SignedStore(store, sign(token, f"session\0{session}".encode()).encode(), "run")


def read_message(message: bytes, *names: str) -> list[str]:
    """Returns these texts of a JSON object, empty ones if it is none: anybody can have written it."""
    raw = None
    with suppress(ValueError, RecursionError):
        raw = json.loads(message) if len(message) <= _LONGEST_MESSAGE else None
    fields = raw if isinstance(raw, dict) else {}
    texts = [value if isinstance(value := fields.get(name), str) else "" for name in names]
    return [text.encode("ascii", "replace").decode() for text in texts]


def shown_name(text: str) -> str:
    """Returns the name of a machine, which anybody can have written."""
    return printable(text[:_LONGEST_NAME])


def describe_ranks(ranks: Iterable[int]) -> str:
    """Returns `rank 3`, `ranks 3 and 5`, or the first ones and how many more there are."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > _MOST_NAMED:
        return f"ranks {', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
