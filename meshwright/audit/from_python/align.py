"""`align_names`: finds the counterparts of a record's tensors in another record, where it was made without knowing it.

`meshwright audit` and `mw.record(reference=…)` do this while they record, with the same functions."""

from functools import partial

import torch
from torch import Tensor

from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder.parts import Held, Part, Region
from meshwright.audit.recorder.start import find_divisions, name_after_reference
from meshwright.audit.recorder.whole import RankRecord, Stored, WholeTensors


def align_names(candidate: RecordedRun, reference: RecordedRun) -> None:
    """Notes the reference's names in the headers of the candidate, as they are in memory, and which part of a tensor
    that is divided by hand a rank holds."""
    whole = WholeTensors(reference.ranks, 0, "own", own_names=True)
    for rank in candidate.ranks:
        described = rank.header["parameters"] | rank.header["buffers"]
        if any(entry["reference_name"] for entry in described.values()):
            continue
        held = _held(rank)
        name_after_reference(held, whole)
        assumed = find_divisions(held, whole, rank.rank)
        if assumed:
            names = ", ".join(assumed[:3])
            rank.header["notes"].append(
                f"which part of the whole a rank holds is assumed from shapes and ranks: {names}"
            )
        for name, entry in held.items():
            described[name].update(entry.to_json())


def _held(rank: RankRecord) -> dict[str, Held]:
    values = rank.tensors(0, "own")
    held = {}
    for name, entry in {**rank.header["parameters"], **rank.header["buffers"]}.items():
        parts = []
        for index, region in enumerate(entry["parts"]):
            stored = values.get(name, {}).get(index, Stored())
            value = None if stored.is_sketch else stored.value
            parts.append(Part(Region.from_json(region), partial(_value, value), lambda: None))
        held[name] = Held(
            name,
            tuple(entry["shape"]),
            getattr(torch, entry["dtype"]),
            tuple(parts),
            entry["trained"],
            entry["layout"],
            entry["same_as"],
        )
    return held


def _value(value: Tensor | None) -> Tensor | None:
    return value
