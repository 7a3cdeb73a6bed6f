"""Checks that rows were read correctly, where a row states a quantity that we can also compute.

Compared are the parameters counted on the meta device with the stated number, and the FLOPs of the model with those
that the stated step time and FLOP/s of a GPU imply.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from validation.runs.case import PublishedCase
from validation.runs.reading.flops import DECODER, MIXTURE, decoder_forward, decoder_parameters
from validation.runs.rows import PublishedRow


@dataclass(frozen=True)
class Mismatch:
    """A quantity of one row for which our count (`ours`) and the published one (`theirs`) differ."""

    id: str
    quantity: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def parameter_mismatches(
    cases: Iterable[PublishedCase], rows: Iterable[PublishedRow], tolerance: float = 0.03
) -> list[Mismatch]:
    """The decoders whose number of parameters differs from the stated one by more than `tolerance`."""
    stated = {row.id: row.model.get("params_B") for row in rows}
    comparisons = []
    for case in cases:
        billions = stated.get(case.id)
        if case.model.call == DECODER and billions:
            ours = decoder_parameters(json.dumps(case.model.arguments, sort_keys=True)) / 1e9
            comparisons.append(Mismatch(case.id, "parameters, B", ours, billions))
    return [mismatch for mismatch in comparisons if abs(mismatch.ratio - 1) > tolerance]


def flops_mismatches(
    cases: Iterable[PublishedCase], rows: Iterable[PublishedRow], tolerance: float = 0.03
) -> list[Mismatch]:
    """The decoders whose FLOP/s of a GPU differ from the stated rate by more than `tolerance`.

    Publications count FLOPs in several ways: with or without recomputation, as 8 or 6 for each stated parameter and
    token, or with half of the pairs of tokens. The way that comes nearest to the stated rate is the one that is
    compared."""
    stated = {row.id: (row.measured.get("tflops_per_gpu"), row.model.get("params_B", 0.0)) for row in rows}
    comparisons = []
    for case in cases:
        tflops, billions = stated[case.id]
        if case.model.call in (DECODER, MIXTURE) and tflops and case.step_s:
            samples_per_rank_s = case.global_batch / (case.plan.world_size * case.step_s * 1e12)
            rates = [samples_per_rank_s * flops for flops in _sample_flops(case, billions)]
            nearest = min(rates, key=lambda rate: abs(rate / tflops - 1))
            comparisons.append(Mismatch(case.id, "TFLOP/s a GPU", nearest, tflops))
    return [mismatch for mismatch in comparisons if abs(mismatch.ratio - 1) > tolerance]


def _sample_flops(case: PublishedCase, billions: float) -> tuple[float, ...]:
    """FLOPs of one sample: without recomputation, with it, by the stated number of parameters, and without the pairs of
    tokens above the causal mask."""
    length, recomputes = case.sample.size[0], case.plan.memory.recompute == "full"
    forward = decoder_forward(case.model.arguments, length)
    without_recomputation = 3 * (forward.blocks + forward.head)
    by_parameters = (8 if recomputes else 6) * billions * 1e9 * length
    causal = without_recomputation - 1.5 * forward.pairs
    with_recomputation = without_recomputation + (forward.blocks if recomputes else 0.0)
    return without_recomputation, with_recomputation, by_parameters, causal
