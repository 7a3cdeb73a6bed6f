"""The collectives that this rank has called, from torch's flight recorder, which Gloo and NCCL fill in the order of the
calls. The number of a collective in its group, and its operation, shapes and dtypes, are the same on all ranks, unless
the ranks do not run the same."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.processes.torch_private import flight_recorder_dumps

_MOST_CALLS = 60  # the last ones of each backend that are compared
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
_ALIKE_ON_ALL_RANKS = ("all-reduce", "broadcast", "all-gather", "reduce-scatter", "barrier")


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that a rank has called. `number` counts the collectives of the group. `sizes` and `dtypes` are those
    of its inputs. `name` says in words what it exchanges; empty if the model does not know it."""

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_done: bool
    is_point_to_point: bool
    name: str = ""

    @property
    def elements(self) -> int:
        total = 0
        for size in self.sizes:
            count = 1
            for length in size:
                count *= length
            total += count
        return total

    def differences(self, other: "CollectiveCall") -> set[str]:
        """Returns in what the calls of two ranks differ: `operation`, or `dtype` and `shape`; empty if they fit."""
        if self.operation != other.operation:
            return {"operation"}
        if not self.operation.startswith(_ALIKE_ON_ALL_RANKS):
            return set()  # ranks give tensors of different shapes to gather, scatter and all-to-all
        differ = {"dtype": set(self.dtypes) != set(other.dtypes), "shape": self.elements != other.elements}
        return {name for name, is_different in differ.items() if is_different}

    def __str__(self) -> str:
        if self.operation == "barrier" or not self.sizes:
            return self.operation
        if len(self.sizes) == 1 and len(self.sizes[0]) > 1:
            return f"{self.operation} of {self.dtypes[0]} {list(self.sizes[0])}"
        plural = "s" if self.elements != 1 else ""
        return f"{self.operation} of {self.elements} {'/'.join(dict.fromkeys(self.dtypes))} value{plural}"


def recorded_calls() -> list[CollectiveCall]:
    """Returns the last collectives that this process has called, in their order; empty if torch has recorded none."""
    entries: list[dict[str, Any]] = []
    for dump in flight_recorder_dumps():
        entries += json.loads(dump).get("entries", [])[-_MOST_CALLS:]
    return [_call(entry) for entry in entries]


def parse_calls(values: Sequence[dict[str, Any]]) -> tuple[CollectiveCall, ...]:
    return tuple(
        CollectiveCall(**{**value, "sizes": tuple(map(tuple, value["sizes"])), "dtypes": tuple(value["dtypes"])})
        for value in values
    )


def plain_calls(calls: Sequence[CollectiveCall]) -> list[dict[str, Any]]:
    return [asdict(call) for call in calls]


def _call(entry: dict[str, Any]) -> CollectiveCall:
    operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    operation = operation.lower().strip("_").replace("_", "-").replace("allreduce", "all-reduce")
    is_point_to_point = bool(entry.get("is_p2p"))
    return CollectiveCall(
        group=" ".join(entry["process_group"]),
        number=int(entry["p2p_seq_id" if is_point_to_point else "collective_seq_id"]),
        operation=operation,
        sizes=tuple(tuple(size) for size in entry.get("input_sizes", ())),
        dtypes=tuple(_DTYPES.get(name, name.lower()) for name in entry.get("input_dtypes", ())),
        is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
        is_point_to_point=is_point_to_point,
    )
