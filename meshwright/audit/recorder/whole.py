"""`WholeTensors`: the whole tensors of a record, put together from the parts that its ranks wrote."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .parts import Region
from .record_files import read_tensors
from .sketches import HeldSlots, Sketch, read_sketch, sketch_of, sketch_part, square_of


@dataclass(frozen=True)
class WrittenPart:
    """A part of a whole tensor as one rank wrote it."""

    rank: int
    region: Region
    value: Tensor


@dataclass
class Stored:
    """What a file has of a part: its elements, or their sketch and the sum of their squares."""

    value: Tensor | None = None
    is_sketch: bool = False
    square: float | None = None


class RankRecord:
    """What one rank wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header: dict[str, Any] = json.loads((folder / "header.json").read_text())
        self.rank: int = int(self.header["rank"])

    def described(self, name: str) -> dict[str, Any] | None:
        """The header's entry of a parameter or buffer."""
        return self.header["parameters"].get(name) or self.header["buffers"].get(name)

    def tensors(self, step: int, kind: str) -> dict[str, dict[int, "Stored"]]:
        """What is written of the parts, by name and number. A parameter that had no gradient is missing."""
        parts: dict[str, dict[int, Stored]] = {}
        for path in sorted(self.folder.glob(f"{step:04d}-{kind}-*.safetensors")):
            for key, value in read_tensors(path).items():
                name, _, place = key.rpartition("#")
                index, _, what = place.partition(".")
                stored = parts.setdefault(name, {}).setdefault(int(index), Stored())
                if what == "square":
                    stored.square = float(value)
                else:
                    stored.value, stored.is_sketch = value, what == "sketch"
        return parts

    @cached_property
    def kinds(self) -> set[tuple[int, str]]:
        names = [path.name.split("-") for path in self.folder.glob("*.safetensors")]
        return {(int(step), kind) for step, kind, *_ in names}


class WholeTensors:
    """The tensors of one kind of one step. `parts` holds, by name, what each rank wrote; names are those of the
    reference where the rank knows them, unless `own_names`. Tensors with more than `sketch_above` elements are their
    sketches: these are in `sketches`, and `shapes` has their shapes."""

    def __init__(
        self,
        ranks: list[RankRecord],
        step: int,
        kind: str,
        own_names: bool = False,
        sketch_above: int | None = None,
    ) -> None:
        self.parts: dict[str, list[WrittenPart]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.squares: dict[str, dict[tuple[int, Region], float]] = {}  # of the elements of a rank's part
        self.sketches: dict[str, Sketch] = {}
        self._incomplete: dict[str, list[tuple[int, HeldSlots]]] = {}
        for rank in ranks:
            if (step, kind) not in rank.kinds:
                continue
            for own_name, values in rank.tensors(step, kind).items():
                entry = rank.described(own_name)
                if entry is None:
                    continue
                name = own_name if own_names else entry.get("reference_name") or own_name
                self._add(rank.rank, name, entry, values, sketch_above)
            self._add_tied(rank, own_names)
        for name, slots in self._incomplete.items():
            self.parts[name] += _complete(self.sketches[name], slots)

    def _add(
        self, rank: int, name: str, entry: dict[str, Any], values: dict[int, Stored], sketch_above: int | None
    ) -> None:
        shape = tuple(entry["shape"])
        written = self.parts.setdefault(name, [])
        for index, region_json in enumerate(entry["parts"]):
            stored = values.get(index)
            if stored is None or stored.value is None:
                continue
            region, value = Region.from_json(region_json), stored.value
            square = stored.square if stored.square is not None else float(square_of(value))
            self.squares.setdefault(name, {})[rank, region] = square
            sketch = Sketch(shape) if stored.is_sketch else None
            if sketch is None and value.is_floating_point():
                sketch = sketch_of(shape, sketch_above)
                value = value if sketch is None else sketch_part(sketch, region, value)
            if sketch is None:
                self.shapes[name] = shape
                written.append(WrittenPart(rank, region, value))
                continue
            self.shapes[name], self.sketches[name] = sketch.size, sketch
            for slots in read_sketch(sketch, region, value):
                if slots.held:
                    self._incomplete.setdefault(name, []).append((rank, slots))
                else:
                    written.append(WrittenPart(rank, slots.region, slots.value))

    def _add_tied(self, rank: RankRecord, own_names: bool) -> None:
        """Further names of a tied parameter have what its first name has."""
        entries = rank.header["parameters"]
        for own_name, entry in entries.items():
            first = entry["same_as"]
            if first is None or first not in entries:
                continue
            name, other = own_name, first
            if not own_names:
                name = entry.get("reference_name") or own_name
                other = entries[first].get("reference_name") or first
            if name not in self.parts and other in self.parts:
                self.parts[name], self.shapes[name] = self.parts[other], self.shapes[other]
                self.squares[name] = self.squares.get(other, {})
                if other in self.sketches:
                    self.sketches[name] = self.sketches[other]

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def square(self, name: str) -> float:
        """The sum of the squares of the whole tensor's elements, each region of which counts once."""
        by_region: dict[Region, float] = {}
        for (_, region), square in sorted(self.squares.get(name, {}).items(), key=lambda entry: -entry[0][0]):
            by_region[region] = square
        return sum(by_region.values())

    def whole(self, name: str, rank: int | None = None) -> Tensor | None:
        """The whole tensor: each element from the lowest rank that holds it, or from `rank` where that holds it. None
        if some element is held by no rank."""
        written = self.parts.get(name)
        if not written:
            return None
        shape = self.shapes[name]
        whole = torch.zeros(shape, dtype=written[0].value.dtype)
        filled = torch.zeros(shape, dtype=torch.bool)
        for part in sorted(written, key=lambda part: (part.rank == rank, -part.rank)):
            part.region.write(whole, part.value)
            part.region.write(filled, torch.ones_like(part.value, dtype=torch.bool))
        return whole if bool(filled.all()) else None


def _complete(sketch: Sketch, slots: list[tuple[int, HeldSlots]]) -> list[WrittenPart]:
    """Adds up the slots of blocks that several ranks hold columns of. Each of these ranks has the sum."""
    by_region: dict[Region, list[tuple[int, HeldSlots]]] = {}
    for rank, held in slots:
        by_region.setdefault(held.region, []).append((rank, held))
    parts = []
    for region, entries in by_region.items():
        assert region.box is not None
        first, last = sketch.columns_of(region.box[1][0])
        distinct = {held.held: held.value for _, held in reversed(entries)}
        if sum(columns[2] for columns in distinct) == last - first + 1:
            value = torch.stack(list(distinct.values())).sum(0)
            parts += [WrittenPart(rank, region, value) for rank in dict.fromkeys(rank for rank, _ in entries)]
    return parts


def read_ranks(folder: Path) -> list[RankRecord]:
    """The ranks of a record, in order."""
    headers = sorted(folder.glob("rank-*/header.json"))
    return [RankRecord(path.parent) for path in headers]
