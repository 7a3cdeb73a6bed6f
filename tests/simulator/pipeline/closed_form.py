"""The span of a pipeline with equal stages in closed form, to check timelines against:

with equal stages (p ranks, v stages per rank, m microbatches, f and b seconds per stage):
    span = (v max(m, p) + min(m, p) - 1) (f + b)        gpipe and 1f1b (v = 1), interleaved_1f1b
         + 2t (p - 1)                                   gpipe, t seconds of transfer
         + 2t ((p - 1)⌈m / p⌉ + max(0, (m - 1) mod p - 1))    1f1b, where a rank waits each p-th time for the rest
"""

from math import ceil

from meshwright.simulator.pipeline.order import check_schedule


def pipeline_span(
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float = 0.0,
) -> float:
    """The span of a timeline whose stages are all equal, in closed form; raises ValueError if the schedule has no
    closed form."""
    check_schedule(schedule, ranks, stages_per_rank, microbatches)
    full, part = max(microbatches, ranks), min(microbatches, ranks)
    span_s = (stages_per_rank * full + part - 1) * (forward_s + backward_s)
    if schedule == "gpipe":
        return span_s + 2 * transfer_s * (ranks - 1)
    if schedule == "1f1b":
        waits = (ranks - 1) * ceil(microbatches / ranks) + max(0, (microbatches - 1) % ranks - 1)
        return span_s + 2 * transfer_s * waits
    if schedule == "interleaved_1f1b" and transfer_s == 0:
        return span_s
    raise ValueError(f"{schedule} with transfers of {transfer_s} s has no closed form: run its timeline")
