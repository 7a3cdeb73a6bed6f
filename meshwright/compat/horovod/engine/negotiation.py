"""`Negotiation`: decides on rank 0 which operations may run, and in which order. An operation may run when every rank
of its process set has asked for it, or has joined. All ranks run the operations in the order that is decided here, so
that no two ranks wait for each other in different collectives.

This file has no sockets and no tensors: requests go in, and the frames for each rank come out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from meshwright.compat.horovod.engine import requests
from meshwright.compat.horovod.engine.requests import GLOBAL_SET, ReduceOp, Request, mismatch

Key = tuple[int, str, str]
_WITHOUT_JOIN = (requests.ALLGATHER, requests.BROADCAST, requests.ALLTOALL, requests.REDUCESCATTER)
_DTYPE_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "uint8": 1, "int8": 1, "bool": 1}


@dataclass
class _Pending:
    """An operation that some ranks have asked for: their requests and the ids by which they know it."""

    calls: dict[int, Request] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)


@dataclass
class Group:
    """Operations that run together. `members` are the ranks that take part, `joined` those of them that contribute
    zeros. `details` has what ranks must know of each other: by operation, by tensor and rank."""

    operations: list[_Pending]
    members: tuple[int, ...]
    joined: tuple[int, ...]
    details: list[Any]

    @property
    def first(self) -> Request:
        return next(iter(self.operations[0].calls.values()))


class Negotiation:
    """The state of the negotiation among `size` ranks. `fusion_bytes` is the most that is fused into one group."""

    def __init__(self, size: int, fusion_bytes: int) -> None:
        self.process_sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._fusion_bytes = fusion_bytes
        self._next_set = 1
        self._pending: dict[Key, _Pending] = {}
        self._blocked: dict[int, dict[Key, None]] = {rank: {} for rank in range(size)}
        self._joined: dict[int, int] = {}  # the id of the join, by rank, in the order of joining
        self._left: dict[int, None] = {}
        self._groups: list[Group] = []
        self._errors: list[tuple[int, int, str, bool]] = []  # (rank, id, text, whether it is a mismatch)

    def submit(self, rank: int, number: int, request: Request) -> None:
        """A rank asks for an operation, which it knows as `number`."""
        if request.kind == requests.JOIN:
            self._joined[rank] = number
            self._check(list(self._pending))
            self._check_all_joined(request)
            return
        pending = self._pending.setdefault(request.key, _Pending())
        pending.calls[rank], pending.ids[rank] = request, number
        self._check([request.key])

    def leave(self, rank: int) -> None:
        """A rank shuts down. Operations that need it fail on the other ranks."""
        self._left[rank] = None
        self._check(list(self._pending))

    def block(self, rank: int, key: Key) -> None:
        """A rank waits for an operation. If all ranks of a process set wait for operations of the same name, but of
        different kinds, none of them can ever run, and all of them fail."""
        if key not in self._pending:
            return
        self._blocked[rank][key] = None
        process_set, _, name = key
        members = self.process_sets.get(process_set, ())
        waits = {
            member: waiting
            for member in members
            for waiting in self._blocked[member]
            if waiting[0] == process_set and waiting[2] == name and waiting in self._pending
        }
        if len(waits) == len(members) and len(set(waits.values())) > 1:
            first_rank, first = next(iter(waits.items()))
            other_rank, other = next((rank, key) for rank, key in waits.items() if key != first)
            text = (
                f"mismatched operations with the name {name}: rank {first_rank} called {first[1]}, rank {other_rank}"
                f" {other[1]}; call the same operation on every rank"
            )
            for waiting in dict.fromkeys(waits.values()):
                self._fail(self._pending.pop(waiting), text, is_mismatch=True)

    def stalled(self) -> list[tuple[Request, list[int]]]:
        """Returns the operations that wait, each with the ranks that have not asked for it."""
        waiting = []
        for pending in self._pending.values():
            request = next(iter(pending.calls.values()))
            missing = [rank for rank in self._members(request) if rank not in pending.calls]
            waiting.append((request, missing))
        return waiting

    def take(self) -> dict[int, dict[str, Any]]:
        """Returns the frames to send, by rank: groups to run in this order, and operations that have failed."""
        frames: dict[int, dict[str, Any]] = {}
        for group in self._fused():
            for rank in group.members:
                entry: dict[str, Any] = {"details": [_for_rank(detail, rank) for detail in group.details]}
                if rank in group.joined and group.first.kind != requests.JOIN:
                    calls = (next(iter(pending.calls.values())) for pending in group.operations)
                    entry["zeros"] = [request.to_plain() for request in calls]
                else:
                    entry["ids"] = [pending.ids[rank] for pending in group.operations]
                frames.setdefault(rank, {}).setdefault("groups", []).append(entry)
        for rank, number, text, is_mismatch in self._errors:
            frames.setdefault(rank, {}).setdefault("errors", []).append([number, text, is_mismatch])
        self._errors = []
        return frames

    def _members(self, request: Request) -> tuple[int, ...]:
        return self.process_sets.get(request.process_set, ())

    def _check(self, keys: Iterable[Key]) -> None:
        """Moves the operations that can run now to the groups, and those that cannot run any more to the errors."""
        for key in keys:
            pending = self._pending[key]
            request = next(iter(pending.calls.values()))
            members = self._members(request)
            if not members:
                self._fail(self._pending.pop(key), f"{request.title}: there is no process set {request.process_set}")
                continue
            missing = [rank for rank in members if rank not in pending.calls and rank not in self._joined]
            gone = [rank for rank in missing if rank in self._left]
            if gone:
                text = f"{request.title}: rank {gone[0]} has shut down; call hvd.shutdown() on no rank before this"
                self._fail(self._pending.pop(key), text)
            elif not missing:
                self._ready(self._pending.pop(key), members)

    def _ready(self, pending: _Pending, members: tuple[int, ...]) -> None:
        pending.calls = dict(sorted(pending.calls.items()))
        request = next(iter(pending.calls.values()))
        joined = tuple(rank for rank in members if rank not in pending.calls)
        for rank in members:
            self._blocked[rank].pop(request.key, None)
        if text := mismatch(pending.calls):
            self._fail(pending, text, is_mismatch=True)
        elif joined and (request.kind in _WITHOUT_JOIN):
            text = f"{request.title}: ranks {list(joined)} have joined, and only an allreduce can go on without them"
            self._fail(pending, text, is_mismatch=True)
        elif request.kind == requests.BROADCAST and request.root not in members:
            text = f"{request.title}: root rank {request.root} is not in the process set of ranks {list(members)}"
            self._fail(pending, text, is_mismatch=True)
        elif problem := self._change_process_sets(request):
            self._fail(pending, problem, is_mismatch=True)
        else:
            details = self._details(pending, members)
            self._groups.append(Group([pending], members, joined, [details]))

    def _change_process_sets(self, request: Request) -> str | None:
        """Adds or removes a process set, if that is what was asked for. Returns why it cannot."""
        if request.kind == requests.ADD_PROCESS_SET:
            if request.ranks in self.process_sets.values():
                return f"a process set with ranks {list(request.ranks)} exists already"
            self.process_sets[self._next_set] = request.ranks
            self._next_set += 1
        if request.kind == requests.REMOVE_PROCESS_SET:
            if request.root not in self.process_sets:
                return f"there is no process set {request.root}"
            del self.process_sets[request.root]
        return None

    def _details(self, pending: _Pending, members: tuple[int, ...]) -> Any:
        request = next(iter(pending.calls.values()))
        if request.kind == requests.ALLGATHER:
            return [
                [pending.calls[rank].shapes[tensor][0] for rank in members] for tensor in range(len(request.shapes))
            ]
        if request.kind == requests.ALLTOALL:  # what each rank receives from the others
            return {
                rank: [pending.calls[sender].splits[position] for sender in members]
                for position, rank in enumerate(members)
            }
        return self._next_set - 1 if request.kind == requests.ADD_PROCESS_SET else None

    def _check_all_joined(self, request: Request) -> None:
        members = self.process_sets[GLOBAL_SET]
        if any(rank not in self._joined for rank in members):
            return
        pending = _Pending(dict.fromkeys(members, request), dict(self._joined))
        self._groups.append(Group([pending], members, (), [list(self._joined)[-1]]))
        self._joined = {}

    def _fail(self, pending: _Pending, text: str, *, is_mismatch: bool = False) -> None:
        for rank, number in pending.ids.items():
            self._blocked[rank].pop(pending.calls[rank].key, None)
            self._errors.append((rank, number, text, is_mismatch))

    def _fused(self) -> list[Group]:
        """Returns the groups that are ready. All-reduces of one type and operation are fused, as far as they fit."""
        fused: list[Group] = []
        open_groups: dict[Any, tuple[Group, int]] = {}
        for group in self._groups:
            request = group.first
            kind = (request.process_set, request.device, request.op, request.prescale, request.postscale)
            key = (*kind, frozenset(request.dtypes), group.joined)
            size = (
                sum(prod(shape) for shape in request.shapes) * _DTYPE_BYTES.get(request.dtypes[0], 4) if key[5] else 0
            )
            can_fuse = request.kind == requests.ALLREDUCE and len(key[5]) == 1 and request.op != ReduceOp.ADASUM
            if can_fuse and key in open_groups and open_groups[key][1] + size <= self._fusion_bytes:
                target, filled = open_groups[key]
                target.operations += group.operations
                target.details += group.details
                open_groups[key] = (target, filled + size)
                continue
            fused.append(group)
            if can_fuse:
                open_groups[key] = (group, size)
        self._groups = []
        return fused


def _for_rank(detail: Any, rank: int) -> Any:
    return detail[rank] if isinstance(detail, dict) else detail
