"""`Request`: what a rank asks for when it calls an operation, without the data. Ranks send requests to rank 0, which
compares them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER, BARRIER, JOIN = "alltoall", "reducescatter", "barrier", "join"
ADD_PROCESS_SET, REMOVE_PROCESS_SET = "add_process_set", "remove_process_set"

GLOBAL_SET = 0  # the id of the process set of all ranks


class ReduceOp(IntEnum):
    """How an all-reduce or reduce-scatter combines tensors. The numbers are those of Horovod."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True)
class Request:
    """One call of an operation on one rank. A grouped operation is one request with several tensors. `root` is a global
    rank. `splits` are the rows that an all-to-all sends to each rank. `ranks` are those of a process set to be
    added."""

    kind: str
    name: str
    process_set: int = GLOBAL_SET
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, str, str]:
        """What calls of the same operation have in common on all ranks."""
        return self.process_set, self.kind, self.name

    @property
    def title(self) -> str:
        """The operation in error messages and in the timeline."""
        return f"{self.kind}.{self.name}"

    def to_plain(self) -> list[Any]:
        return [
            *(self.kind, self.name, self.process_set, self.dtypes, self.shapes, self.device, int(self.op)),
            *(self.prescale, self.postscale, self.root, self.splits, self.ranks),
        ]

    @staticmethod
    def from_plain(plain: list[Any]) -> "Request":
        kind, name, process_set, dtypes, shapes, device, op, prescale, postscale, root, splits, ranks = plain
        return Request(
            *(kind, name, process_set, tuple(dtypes), tuple(map(tuple, shapes)), device, op),
            *(prescale, postscale, root, tuple(splits), tuple(ranks)),
        )


def mismatch(requests: Mapping[int, Request]) -> str | None:
    """Returns what differs between the requests of two ranks for the same operation, with both sides; None if the
    operation can run. `requests` are by rank."""
    first_rank, first = next(iter(requests.items()))
    for rank, request in requests.items():
        for what, ours, theirs in _compared(first, request):
            if ours != theirs:
                return (
                    f"mismatched {what} in {first.title}: rank {first_rank} called it with {ours}, rank {rank} with"
                    f" {theirs}; call it with the same on every rank"
                )
    return None


def _compared(a: Request, b: Request) -> list[tuple[str, Any, Any]]:
    """Returns (what, of the one, of the other) for everything that has to be equal."""
    pairs: list[tuple[str, Any, Any]] = [
        ("devices", a.device, b.device),
        ("data types", _listed(a.dtypes), _listed(b.dtypes)),
        ("numbers of tensors", len(a.shapes), len(b.shapes)),
        ("root ranks", a.root, b.root),
        ("process sets", list(a.ranks), list(b.ranks)),
    ]
    if a.kind in (ALLREDUCE, REDUCESCATTER):
        pairs += [
            ("reduce operations", ReduceOp(a.op).name.title(), ReduceOp(b.op).name.title()),
            ("prescale factors", a.prescale, b.prescale),
            ("postscale factors", a.postscale, b.postscale),
        ]
    if a.kind in (ALLGATHER, ALLTOALL):
        pairs.append(("shapes after the first dimension", _trailing(a.shapes), _trailing(b.shapes)))
    else:
        pairs.append(("shapes", _listed(a.shapes), _listed(b.shapes)))
    return pairs


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values)) if values else "none"


def _trailing(shapes: tuple[tuple[int, ...], ...]) -> str:
    return _listed(tuple(shape[1:] for shape in shapes))
