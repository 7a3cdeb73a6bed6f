"""Whether the rows were read rightly: what they say twice must agree.

Parameters counted on the meta device against the row's; FLOPs of the model against those that a row's step time and
FLOP/s a GPU imply.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from validation.runs.case import Case
from validation.runs.reading.flops import DECODER, decoder_forward, decoder_parameters
from validation.runs.rows import Row


@dataclass(frozen=True)
class Mismatch:
    """`ratio` of ours to theirs."""

    id: str
    what: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def parameter_mismatches(cases: Iterable[Case], rows: Iterable[Row], tolerance: float = 0.03) -> list[Mismatch]:
    stated = {row.id: row.model.get("params_B") for row in rows}
    found = []
    for case in cases:
        billions = stated.get(case.id)
        if case.model.call == DECODER and billions:
            ours = decoder_parameters(json.dumps(case.model.arguments, sort_keys=True)) / 1e9
            found.append(Mismatch(case.id, "parameters, B", ours, billions))
    return [mismatch for mismatch in found if abs(mismatch.ratio - 1) > tolerance]


def flops_mismatches(cases: Iterable[Case], rows: Iterable[Row], tolerance: float = 0.03) -> list[Mismatch]:
    """Each against the nearest of the counts that publications use: the operations with and without what is computed
    again, and 8 or 6 for each of the stated parameters and each token."""
    stated = {row.id: (row.measured.get("tflops_per_gpu"), row.model.get("params_B", 0.0)) for row in rows}
    found = []
    for case in cases:
        tera, billions = stated[case.id]
        if case.model.call == DECODER and tera and case.step_s:
            a_rank = case.global_batch / (case.plan.world_size * case.step_s * 1e12)
            counts = [a_rank * count for count in _counts(case, billions)]
            found.append(Mismatch(case.id, "TFLOP/s a GPU", min(counts, key=lambda ours: abs(ours / tera - 1)), tera))
    return [mismatch for mismatch in found if abs(mismatch.ratio - 1) > tolerance]


def _counts(case: Case, billions: float) -> tuple[float, ...]:
    """Operations of one sample."""
    length, recomputes = case.sample.size[0], case.plan.memory.recompute == "full"
    forward = decoder_forward(case.model.arguments, length)
    once = 3 * (forward.blocks + forward.head)
    rule = (8 if recomputes else 6) * billions * 1e9 * length
    return once, once + (forward.blocks if recomputes else 0.0), rule
