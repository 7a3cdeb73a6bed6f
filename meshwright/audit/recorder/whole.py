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


@dataclass(frozen=True)
class WrittenPart:
    """A part of a whole tensor as one rank wrote it."""

    rank: int
    region: Region
    value: Tensor


class RankRecord:
    """What one rank wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header: dict[str, Any] = json.loads((folder / "header.json").read_text())
        self.rank: int = int(self.header["rank"])

    def described(self, name: str) -> dict[str, Any] | None:
        """The header's entry of a parameter or buffer."""
        return self.header["parameters"].get(name) or self.header["buffers"].get(name)

    def tensors(self, step: int, kind: str) -> dict[str, list[Tensor | None]]:
        """The written parts by name. A parameter that had no gradient is missing."""
        parts: dict[str, list[Tensor | None]] = {}
        for path in sorted(self.folder.glob(f"{step:04d}-{kind}-*.safetensors")):
            for key, value in read_tensors(path).items():
                name, _, index = key.rpartition("#")
                listed = parts.setdefault(name, [])
                listed.extend([None] * (int(index) + 1 - len(listed)))
                listed[int(index)] = value
        return parts

    @cached_property
    def kinds(self) -> set[tuple[int, str]]:
        names = [path.name.split("-") for path in self.folder.glob("*.safetensors")]
        return {(int(step), kind) for step, kind, *_ in names}


class WholeTensors:
    """The tensors of one kind of one step. `parts` holds, by name, what each rank wrote; names are those of the
    reference where the rank knows them, unless `own_names`."""

    def __init__(self, ranks: list[RankRecord], step: int, kind: str, own_names: bool = False) -> None:
        self.parts: dict[str, list[WrittenPart]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for rank in ranks:
            if (step, kind) not in rank.kinds:
                continue
            for own_name, values in rank.tensors(step, kind).items():
                entry = rank.described(own_name)
                if entry is None:
                    continue
                name = own_name if own_names else entry.get("reference_name") or own_name
                self.shapes[name] = tuple(entry["shape"])
                written = self.parts.setdefault(name, [])
                for region, value in zip(entry["parts"], values, strict=False):
                    if value is not None:
                        written.append(WrittenPart(rank.rank, Region.from_json(region), value))
            self._add_tied(rank, own_names)

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

    def __contains__(self, name: str) -> bool:
        return name in self.parts

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


def read_ranks(folder: Path) -> list[RankRecord]:
    """The ranks of a record, in order."""
    headers = sorted(folder.glob("rank-*/header.json"))
    return [RankRecord(path.parent) for path in headers]
