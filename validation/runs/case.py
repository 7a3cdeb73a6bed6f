"""`PublishedCase`: a published training run in our own terms, complete enough to be predicted.

`NotCovered` gives the reason why a published row cannot be turned into such a case.
"""

from dataclasses import dataclass
from typing import Literal

from meshwright.plan import Plan
from meshwright.user.call import Call

AttentionKind = Literal["flash", "scores"]


class NotCovered(Exception):
    """The reason why a row cannot be predicted: one line, the same text for every row that it applies to."""


@dataclass(frozen=True)
class Sample:
    """The shape of one sample and of its target, by `kind`:

    - `tokens`: `size` is the sequence length, and every token is a target
    - `words`: `size` is the sequence length, and the words at the first `targets` positions are predicted
    - `spans`: `size` is the sequence length, and the target is the begin and the end of a span
    - `images`: `size` is height and width, and the target is one class
    - `masks`: `size` is height and width, and the target is a class for each pixel
    - `boxes`: `size` is height and width, and the target is a class and four coordinates for each of `targets` boxes
    """

    kind: Literal["tokens", "words", "spans", "images", "masks", "boxes"]
    size: tuple[int, ...]
    targets: int = 0


@dataclass(frozen=True)
class PublishedCase:
    """One published run.

    - `family` is equal for rows that differ only in their plan.
    - `optimizer` is None where a measured step is the forward and the backward pass alone.
    - `attention` is `scores` where the engine writes the scores of all pairs of tokens to memory, else `flash`.
    - `step_s` is None for a run that ran out of memory (`oom`).
    - `defaults` describes every choice that the row does not state, or that a `Plan` cannot express.
    """

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
    attention: AttentionKind
    compiled: bool
    step_s: float | None
    memory_bytes: float | None
    memory_kind: str | None
    oom: bool
    defaults: tuple[str, ...]
