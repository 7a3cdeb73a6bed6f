"""The plans under which every kind of model is proved: single axes, pairs, triples and all four, as one table.

A case is a text such as `R2T2 sequence`: the sizes of the axes by their first letters, and further options.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import default_collate

from meshwright.plan import Plan
from meshwright.profile.structure.structure import find_structure
from tests.zoo import ZOO, RandomSamples

AXES = {"R": "replicate", "S": "shard", "C": "context", "T": "tensor", "P": "pipeline", "E": "expert"}
OPTIONS: dict[str, dict[str, Any]] = {
    "twice": {"memory": {"accumulation": 2}},
    "optimizer": {"memory": {"sharding": "optimizer", "accumulation": 2}},
    "gradients": {"memory": {"sharding": "gradients", "accumulation": 2}},
    "full": {"memory": {"recompute": "full"}},
    "selective": {"memory": {"recompute": "selective"}},
    "sequence": {"modules": {"sequence": True}},
    "loss": {"modules": {"loss": True}},
    "ring": {"modules": {"attention_exchange": "ring"}},
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
# Samples of a global batch of 16 by data rank; with `moving`, some of them move to another rank in every step.
SHARES = {2: (11, 5), 3: (7, 5, 4), 4: (7, 4, 3, 2)}
# Proportions of the shards, by rank of the shard axis, of cases with the option `shards`.
SHARDS = {2: (1, 3), 3: (2, 5, 1), 4: (3, 1, 2, 2)}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2, "zbv": 2}  # stages of each rank
# Cuts between which layers that are split together lie in one stage.
CUTS = {
    "mnist": ("conv2",),
    "vgg": ("features.3", "pool", "classifier.4"),
    "resnet": ("layer1.0", "layer1.1", "layer2.0"),
    "gpt": ("blocks.0", "blocks.1", "blocks.2"),
    "bert": ("encoder.layers.0", "encoder.layers.1", "encoder.layers.2"),
    "two_tower": ("query",),
    "multitask": ("encoder.2",),
    "mixture": ("blocks.0", "blocks.1", "blocks.2"),
}


def plan_of(kind: str, case: str) -> Plan:
    """The plan of a case, for one kind of model."""
    return plan_with_cuts(case, partial(cuts_of, kind))


def plan_with_cuts(case: str, cuts: Callable[[int], tuple[str, ...]]) -> Plan:
    """The plan of a case; `cuts` has the cuts of a model for a number of stages."""
    sizes, *options = case.split()
    axes = {AXES[letter]: int(size) for letter, size in zip(sizes[::2], sizes[1::2], strict=True)}
    plan: dict[str, Any] = {"axes": axes}
    for option in options:
        for group, fields in OPTIONS.get(option, {}).items():
            plan.setdefault(group, {}).update(fields)
    if "uneven" in options or "moving" in options:
        samples = SHARES[axes.get("replicate", 1) * axes.get("shard", 1)]
        plan["shares"] = {"samples": samples, "adaptive": "moving" in options}
    if "shards" in options:
        plan.setdefault("shares", {})["shards"] = SHARDS[axes["shard"]]
    if axes.get("pipeline", 1) > 1:
        schedule = next((option for option in options if option in SCHEDULES), "1f1b")
        stages = axes["pipeline"] * SCHEDULES[schedule]
        plan["pipeline"] = {"schedule": schedule, "microbatches": axes["pipeline"], "cuts": cuts(stages)}
    return Plan.model_validate(plan)


def cuts_of(kind: str, stages: int) -> tuple[str, ...]:
    """The middle one of the cuts for two stages, all of them for four; if they are too few, the first ones that the
    model has."""
    cuts = CUTS[kind]
    if stages == 2:
        return (cuts[len(cuts) // 2],)
    return cuts if len(cuts) == stages - 1 else all_cuts(kind)[: stages - 1]


@cache
def all_cuts(kind: str) -> tuple[str, ...]:
    """Every place where the model can be cut."""
    data = RandomSamples(ZOO[kind].data)
    with torch.device("meta"):
        model = ZOO[kind].model()
    structure = find_structure(model, default_collate([data[0], data[1]]))
    return tuple(dict.fromkeys(cut.after for cut in structure.cuts))


SINGLE = ("R2", "S2", "T2", "P2")
PAIRS = ("R2S2", "R2T2", "R2P2", "S2T2", "S2P2", "T2P2")
TRIPLES = ("R2S2T2", "R2S2P2", "R2T2P2", "S2T2P2")
ALL_FOUR = "R2S2T2P2"
ATTENTION_MODELS = ("gpt", "bert")

COVERING: tuple[tuple[str, str], ...] = (
    ("mnist", "S2P2 twice"),
    ("vgg", "R2 wide"),
    ("resnet", "R2P2 twice"),
    ("mnist", "T2P2 twice"),
    ("bert", "T2 sequence loss"),
    ("gpt", "C2 ring full twice"),
    ("two_tower", "R2S2 twice"),
    ("multitask", "R2T2 twice"),
    ("multitask", "S2T2 twice"),
    ("mixture", "R2E2 twice"),
    ("mixture", "S2C2E2 ring"),
)
# The expert axis lies within replicate and shard: alone in either, and together with every other axis.
WITH_EXPERTS = (
    *("S2E2 optimizer", "S2E2 full", "R2E2 selective", "R4E2", "R4E4", "S4E2 gradients", "S4E2 full", "R2S2E2 twice"),
    *("R2T2E2", "S2T2E2", "S2T2E2 sequence", "R2P2E2 twice", "S2P2E2", "R2P2E2 gpipe", "S2P2E2 interleaved_1f1b"),
    *("S4T2E2", "S4P2E2", "R2T2P2E2", "S2T2P2E2", "R2S2T2E2", "R2S2P2E2"),
    *("R2C2E2 twice", "S2C2E2 full", "R4C2E2", "R2S2C2E2", "S2C2T2E2", "R2C2P2E2 ring"),
    *("R8E4", "S8E4 full", "R2S4E4 twice", "S8E2 gradients"),
)
# Context ranks compute their own tokens, in whatever form a model has its experts.
WITH_EXPERTS_ON_EVERY_RANK = ("C2 ring twice", "C2 selective", "S2C2 ring", "C2T2", "C2P2 ring")


def all_cases() -> tuple[tuple[str, str], ...]:
    """All kinds of models under all products of two axes, four kinds under all of three and two under all four (eight
    and sixteen ranks take long on two cores), and further options for the kinds that have them."""
    cases = [
        (kind, f"{axes} twice" if axes in (*SINGLE, *PAIRS) else axes)
        for kind in ZOO
        for axes in (*SINGLE, *PAIRS, *(TRIPLES if kind in ("gpt", "bert", "resnet", "two_tower") else ()))
    ]
    for kind in ATTENTION_MODELS:
        cases += [(kind, f"T2 {word}") for word in ("sequence", "loss", "full", "selective", "sequence full")]
        cases += [(kind, "T2 sequence loss twice")]
        cases += [(kind, f"P2 {schedule}") for schedule in SCHEDULES]
        cases += [
            (kind, case) for case in ("T4", "P4", "S4", "R4", "R2T2 sequence", "S2T2 sequence full", "T2P2 sequence")
        ]
        cases += [(kind, case) for case in ("S2 optimizer", "S2 gradients", "S2 full", "S2P2 full", "R2P2 zero_bubble")]
        cases += [(kind, case) for case in ("S2P2 interleaved_1f1b", "T2P2 zbv", "R2S2 gradients")]
        cases += [(kind, f"C2{axes}") for axes in ("", " ring", " ring full", " selective", " ring twice")]
        cases += [(kind, case) for case in ("C3 ring", "R2C2 ring twice", "S2C2 gradients", "S2C2 ring full")]
        cases += [(kind, case) for case in ("C2T2 loss", "C2T2 ring sequence", "C2P2 ring", "S2C2 optimizer")]
        cases += [(kind, case) for case in ("R2S2C2 ring", "S2C2T2 ring", "R2C2P2", "C2T2P2 ring sequence")]
    cases += [("gpt", "C2P2 zbv")]
    cases += [("gpt", "S2P2 zbv")]  # refused for bert, whose tied parameter would be on two stages of one rank
    cases += [("bert", case) for case in ("R2P2 zbv", "T2P2 interleaved_1f1b", "S2P2 zero_bubble")]
    cases += [("resnet", case) for case in ("R2 synchronized twice", "S2 synchronized", "R2P2 synchronized", "R2 full")]
    cases += [("resnet", f"P2 {schedule}") for schedule in SCHEDULES]
    cases += [("vgg", case) for case in ("R2 wide", "R4 wide", "R2 wide twice")]
    cases += [(kind, ALL_FOUR) for kind in ("gpt", "resnet")]
    cases += [("mixture", case) for case in (*WITH_EXPERTS, *WITH_EXPERTS_ON_EVERY_RANK)]
    return tuple(cases)
