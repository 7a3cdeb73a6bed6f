"""`RecordedRun`: what was recorded of a command, as the comparison and the causes read it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.audit.recorder.record_files import read_events
from meshwright.audit.recorder.settings import Settings
from meshwright.audit.recorder.sketches import Sketch, sketch_of
from meshwright.audit.recorder.whole import RankRecord, WholeTensors, WrittenPart, read_ranks
from meshwright.errors import InputError


@dataclass(frozen=True)
class Event:
    """An event of one rank; `values` are its fields."""

    rank: int
    kind: str
    step: int
    values: dict[str, Any]

    def __getitem__(self, field: str) -> Any:
        return self.values[field]


class RecordedRun:
    """A record. Names of tensors are those of the reference where they have a counterpart there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.ranks: list[RankRecord] = read_ranks(folder)
            self.events_by_rank = {rank.rank: _read_events(rank) for rank in self.ranks}
            self.sketch_above = Settings.read(folder).sketch_above
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"the record in {folder} cannot be read: {error}") from None
        self._wholes = lru_cache(maxsize=6)(self._read_wholes)

    @property
    def world_size(self) -> int:
        """The number of ranks that trained."""
        return len(self.ranks)

    @cached_property
    def steps(self) -> int:
        """The number of optimizer steps that every rank took that holds parameters. LBFGS writes no gradients, and a
        library whose weights cannot be read writes no weights."""
        return min(self._steps_by_rank().values(), default=0)

    def _steps_by_rank(self) -> dict[int, int]:
        return {
            rank.rank: max(
                (step for step, kind in rank.kinds if kind in ("weight", "gradient", "unclipped")), default=0
            )
            for rank in self.ranks
            if rank.header["parameters"]
        }

    @cached_property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The header's entries of parameters by name, in the order of the model; those of the lowest rank."""
        return self._entries("parameters")

    @cached_property
    def buffers(self) -> dict[str, dict[str, Any]]:
        return self._entries("buffers")

    def _entries(self, field: str) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for rank in self.ranks:
            for own_name, entry in rank.header[field].items():
                entries.setdefault(entry.get("reference_name") or own_name, entry)
        return entries

    @cached_property
    def dtypes(self) -> set[str]:
        """The floating-point types that any rank computed in."""
        return {dtype for rank in self.ranks for dtype in rank.header["dtypes"]}

    def holders(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """The ranks that hold a part of a parameter, each with the header's entry."""
        held = []
        for rank in self.ranks:
            for own_name, entry in rank.header["parameters"].items():
                if (entry.get("reference_name") or own_name) == name and entry["parts"]:
                    held.append((rank.rank, entry))
        return held

    def tensors(self, step: int, kind: str) -> WholeTensors:
        """The tensors of a kind in a step: `whole(name)`, and `parts[name]` as each rank wrote them."""
        return self._wholes(step, kind)

    def _read_wholes(self, step: int, kind: str) -> WholeTensors:
        try:
            return WholeTensors(self.ranks, step, kind, sketch_above=self.sketch_above)
        except (ValueError, KeyError, OSError, RuntimeError, IndexError) as error:
            raise InputError(f"the record in {self.folder} cannot be read: {error}") from None

    def whole(self, step: int, kind: str, name: str, rank: int | None = None) -> Tensor | None:
        return self.tensors(step, kind).whole(name, rank)

    def sketch(self, name: str) -> Sketch | None:
        """The sketch that is compared in place of a parameter or buffer; None if all of its elements are."""
        entry = self.parameters.get(name) or self.buffers.get(name)
        if entry is None or not entry["dtype"].startswith(("float", "bfloat")):
            return None
        return sketch_of(tuple(entry["shape"]), self.sketch_above)

    def plain(self, name: str, value: Tensor) -> Tensor:
        """Those of a tensor's elements that are recorded as they are: plain columns of a sketch, or all."""
        sketch = self.sketch(name)
        return value if sketch is None else value[:, sketch.blocks :]

    def whole_plain(self, step: int, kind: str, name: str) -> Tensor | None:
        value = self.whole(step, kind, name)
        return None if value is None else self.plain(name, value)

    def parts(self, step: int, kind: str, name: str) -> list[WrittenPart]:
        return self.tensors(step, kind).parts.get(name, [])

    def events(self, kind: str, step: int | None = None) -> list[Event]:
        """The events of a kind, of all steps or of one, by rank and in their order."""
        return [
            event
            for rank in sorted(self.events_by_rank)
            for event in self.events_by_rank[rank]
            if event.kind == kind and (step is None or event.step == step)
        ]

    def gradient_kinds(self, other: "RecordedRun", step: int) -> tuple[str, str]:
        """The kinds of tensors that hold this run's and the other one's gradients before clipping. They are the
        gradients as the optimizer gets them (of both) if one side clips in a way that is not seen."""
        kinds = [[kind for kind in ("unclipped", "gradient") if run.tensors(step, kind).parts] for run in (self, other)]
        for kind in ("unclipped", "gradient"):
            if all(kind in written for written in kinds):
                return kind, kind
        own, theirs = (written[0] if written else "gradient" for written in kinds)
        return own, theirs

    def notes(self) -> list[str]:
        ended = {event.rank for event in self.events("end")}
        killed = [
            f"rank {rank.rank} was killed after step {self.steps}" for rank in self.ranks if rank.rank not in ended
        ]
        counts = self._steps_by_rank()
        most = max(counts.values(), default=0)
        fewer = [
            f"rank {rank} took {count} optimizer steps and others {most}: the first {self.steps} are compared"
            for rank, count in counts.items()
            if count < most
        ]
        return [*dict.fromkeys(note for rank in self.ranks for note in rank.header["notes"]), *killed, *fewer[:1]]

    def close(self) -> None:
        self._wholes.cache_clear()


def _read_events(rank: RankRecord) -> list[Event]:
    path = rank.folder / "events.jsonl"
    rows: Iterable[dict[str, Any]] = read_events(path) if path.exists() else ()
    return [Event(rank.rank, str(row.get("kind")), int(row.get("step", 0)), row) for row in rows]
