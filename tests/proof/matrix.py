"""Which plans every kind of model is proved under: single axes, pairs, triples and all four, as one table.

A case is a word such as `R2T2 seq`: the sizes of the axes by their first letters, and what is chosen beside them.
"""

from functools import cache
from typing import Any

import torch
from torch.utils.data import default_collate

from meshwright.plan import Plan
from meshwright.profile.structure.structure import structure
from tests.zoo import ZOO, Made

AXES = {"R": "replicate", "S": "shard", "T": "tensor", "P": "pipeline"}
WORDS: dict[str, dict[str, Any]] = {
    "twice": {"memory": {"accumulation": 2}},
    "optimizer": {"memory": {"sharding": "optimizer", "accumulation": 2}},
    "gradients": {"memory": {"sharding": "gradients", "accumulation": 2}},
    "full": {"memory": {"recompute": "full"}},
    "selective": {"memory": {"recompute": "selective"}},
    "sequence": {"modules": {"sequence": True}},
    "loss": {"modules": {"loss": True}},
    "synchronized": {"numerics": {"batch_norm": "synchronized"}},
    "wide": {
        "modules": {
            "splits": {
                "classifier.0": {"kind": "column", "axis": "replicate"},
                "classifier.3": {"kind": "row", "axis": "replicate"},
                "classifier.5": {"kind": "column", "axis": "replicate"},
            }
        }
    },
}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2, "zbv": 2}  # with the stages of a rank
# Where it is cut best: at least the layers that are split together lie in one stage.
CUTS = {
    "mnist": ("conv2",),
    "vgg": ("features.3", "pool", "classifier.4"),
    "resnet": ("layer1.0", "layer1.1", "layer2.0"),
    "gpt": ("blocks.0", "blocks.1", "blocks.2"),
    "bert": ("encoder.layers.0", "encoder.layers.1", "encoder.layers.2"),
    "two_tower": ("query",),
    "multitask": ("encoder.2",),
}


def plan_of(kind: str, case: str) -> Plan:
    sizes, *words = case.split()
    axes = {AXES[letter]: int(size) for letter, size in zip(sizes[::2], sizes[1::2], strict=True)}
    chosen: dict[str, Any] = {"axes": axes}
    for word in words:
        for group, fields in WORDS.get(word, {}).items():
            chosen.setdefault(group, {}).update(fields)
    if axes.get("pipeline", 1) > 1:
        schedule = next((word for word in words if word in SCHEDULES), "1f1b")
        stages = axes["pipeline"] * SCHEDULES[schedule]
        chosen["pipeline"] = {"schedule": schedule, "microbatches": axes["pipeline"], "cuts": cuts_of(kind, stages)}
    return Plan.model_validate(chosen)


def cuts_of(kind: str, stages: int) -> tuple[str, ...]:
    """The middle one of the cuts for two stages, all of them for four; of the model's own where these are too few."""
    known = CUTS[kind]
    if stages == 2:
        return (known[len(known) // 2],)
    return known if len(known) == stages - 1 else any_cuts(kind)[: stages - 1]


@cache
def any_cuts(kind: str) -> tuple[str, ...]:
    data = Made(ZOO[kind].data)
    with torch.device("meta"):
        model = ZOO[kind].model()
    found = structure(model, default_collate([data[0], data[1]]))
    return tuple(dict.fromkeys(cut.after for cut in found.cuts))


SINGLE = ("R2", "S2", "T2", "P2")
PAIRS = ("R2S2", "R2T2", "R2P2", "S2T2", "S2P2", "T2P2")
TRIPLES = ("R2S2T2", "R2S2P2", "R2T2P2", "S2T2P2")
ALL_FOUR = "R2S2T2P2"
ATTENDING = ("gpt", "bert")

COVERING: tuple[tuple[str, str], ...] = (
    ("mnist", "R2 twice"),
    ("mnist", "S2P2 twice"),
    ("vgg", "R2 wide"),
    ("resnet", "R2P2 twice"),
    ("resnet", "S2 synchronized optimizer"),
    ("gpt", "T2 sequence loss twice"),
    ("gpt", "P2 zbv twice"),
    ("bert", "R2T2 twice"),
    ("bert", "T2P2"),
    ("two_tower", "R2S2 twice"),
    ("multitask", "S2T2 twice"),
)


def every() -> tuple[tuple[str, str], ...]:
    """All kinds under all products of two axes, four of them under all of three and two under all four, as eight and
    sixteen ranks on two cores take their time; and what only some kinds have beside them."""
    found = [
        (kind, f"{axes} twice" if axes in (*SINGLE, *PAIRS) else axes)
        for kind in ZOO
        for axes in (*SINGLE, *PAIRS, *(TRIPLES if kind in ("gpt", "bert", "resnet", "two_tower") else ()))
    ]
    for kind in ATTENDING:
        found += [(kind, f"T2 {word}") for word in ("sequence", "loss", "full", "selective", "sequence full")]
        found += [(kind, f"P2 {schedule}") for schedule in SCHEDULES]
        found += [
            (kind, case) for case in ("T4", "P4", "S4", "R4", "R2T2 sequence", "S2T2 sequence full", "T2P2 sequence")
        ]
        found += [(kind, case) for case in ("S2 optimizer", "S2 gradients", "S2 full", "S2P2 full", "R2P2 zero_bubble")]
        found += [(kind, case) for case in ("S2P2 interleaved_1f1b", "T2P2 zbv", "R2S2 gradients")]
    found += [("gpt", "S2P2 zbv")]  # refused for the other one, whose tied weight would lie on two stages of one rank
    found += [("bert", case) for case in ("R2P2 zbv", "T2P2 interleaved_1f1b", "S2P2 zero_bubble")]
    found += [("resnet", case) for case in ("R2 synchronized twice", "S2 synchronized", "R2P2 synchronized", "R2 full")]
    found += [("resnet", f"P2 {schedule}") for schedule in SCHEDULES]
    found += [("vgg", case) for case in ("R2 wide", "R4 wide", "R2 wide twice")]
    found += [(kind, ALL_FOUR) for kind in ("gpt", "resnet")]
    return tuple(found)
