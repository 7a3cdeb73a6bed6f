"""Ranks agree on what they run before they train: a rank with another version or another job file would train another
model, or wait for an operation that the others never start.

Every rank writes a small record of texts to the store, and rank 0 compares all of them and writes the verdict, so each
rank sends and reads as much whatever their number. Records and verdict are signed with the token of the run if another
launcher has started the ranks. Without a store, the records go through the process group.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.errors import CollectiveError, InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.processes.token.admission import describe_ranks
from meshwright.processes.token.signed_store import read, read_many, write
from meshwright.version import VERSION

Record = Mapping[str, str]

_PACKAGE = Path(__file__).parents[1]
_LONGEST_VALUE = 80
_MOST_DIFFERENCES = 5


def agree(record: Record, rank: int, size: int, store: dist.Store | None, topic: str, timeout_s: float) -> None:
    """Returns if all ranks call this with the same record. Otherwise every rank raises an InputError that says which
    rank differs in what. `topic` is a name that no other call of this process has."""
    if store is None:
        problem = find_differences(all_gather_values(dict(record))) if dist.is_initialized() else ""
    elif rank == 0:
        others = _read_records(store, size, topic, timeout_s)
        problem = find_differences([dict(record), *others])
        write(store, f"{topic}/verdict", json.dumps(problem))
    else:
        write(store, f"{topic}/{rank}", json.dumps(dict(record)))
        store.wait([f"{topic}/verdict"], timedelta(seconds=timeout_s))
        problem = json.loads(read(store, f"{topic}/verdict"))
    if problem:
        raise InputError(problem)


def _read_records(store: dist.Store, size: int, topic: str, timeout_s: float) -> list[Record]:
    keys = {rank: f"{topic}/{rank}" for rank in range(1, size)}
    if not keys:
        return []
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        raise CollectiveError(
            f"{describe_ranks(missing)} joined, but did not say within {timeout_s:g} s which {topic} they have"
        ) from error
    return [json.loads(value) for value in read_many(store, list(keys.values()))]


def find_differences(records: Sequence[Record]) -> str:
    """Returns which ranks differ from rank 0 in what; empty if all are equal."""
    ranks_by_difference: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, record in enumerate(records):
        if record == records[0]:
            continue
        for name in sorted({*record, *records[0]}):
            here, there = record.get(name, "missing"), records[0].get(name, "missing")
            if here != there:
                ranks_by_difference[name, here, there].append(rank)
    if not ranks_by_difference:
        return ""
    sentences = [
        f"{name} is {here} on {describe_ranks(ranks)} and {there} on rank 0"
        for (name, here, there), ranks in ranks_by_difference.items()
    ]
    more = len(sentences) - _MOST_DIFFERENCES
    return (
        f"the ranks do not run the same: {'; '.join(sentences[:_MOST_DIFFERENCES])}"
        f"{f'; and {more} more differences' if more > 0 else ''}: start all of them with the same files and versions"
    )


def short_value(value: object) -> str:
    """Returns a plain value as text for a record: its JSON, or the digest of that if it is long."""
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= _LONGEST_VALUE else digest(text.encode())


def digest(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:12]}"


@cache
def versions() -> Record:
    """Returns the record of what this process has installed: torch, and meshwright with its code."""
    code = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        code.update(f"{file.relative_to(_PACKAGE)}\0".encode())
        code.update(hashlib.sha256(file.read_bytes()).digest())
    return {
        "torch": str(torch.__version__),  # plain text, and not its subclass
        "meshwright": VERSION,
        "the code of meshwright": f"sha256 {code.hexdigest()[:12]}",
    }
