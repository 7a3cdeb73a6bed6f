"""`Case`: a published training run in our own words, complete enough to be predicted. `NotCovered`: why it is none."""

from dataclasses import dataclass
from typing import Literal

from meshwright.call import Call
from meshwright.plan import Plan

Attention = Literal["flash", "scores"]


class NotCovered(Exception):
    """Why a row is no case: one line, the same for all rows it holds for."""


@dataclass(frozen=True)
class Sample:
    """One sample. `tokens`: a length, each of which is a target; `words`: a length, the first `targets` of which are
    predicted; `spans`: a length with a begin and an end; `images`: height and width with a class; `masks`: with a
    class for each pixel; `boxes`: with a class and four coordinates for each of `targets` boxes."""

    kind: Literal["tokens", "words", "spans", "images", "masks", "boxes"]
    size: tuple[int, ...]
    targets: int = 0


@dataclass(frozen=True)
class Case:
    """`family` is the same for rows that differ only in their plan. `attention`: whether the engine writes out the
    scores of all pairs. `optimizer` is None where a step is only the forward and the backward pass. `defaults` names
    every choice that the row does not state, or that a `Plan` cannot say.

    `step_s` is None for a run that was out of memory (`oom`)."""

    id: str
    source: str
    family: str
    model: Call
    sample: Sample
    loss: Call
    optimizer: Call | None
    cluster: str
    plan: Plan
    global_batch: int
    micro_batch: int
    engine: str
    precision: str
    attention: Attention
    compiled: bool
    step_s: float | None
    memory_bytes: float | None
    memory_kind: str | None
    oom: bool
    defaults: tuple[str, ...]
