"""Sums over the pieces of pipeline stages, how much compiled code saves, and what a schedule adds to the bounds of a
candidate: microbatches in flight, and the span of all passes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Compute
from meshwright.planner.candidates import Candidate
from meshwright.planner.compute_variants import compilations
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary, PieceSummary
from meshwright.profile.values import Phase
from meshwright.simulator.compute.compiled_profile import compiled_profile
from meshwright.simulator.compute.passes import pass_s

_SAMPLES = (1, 16)  # of the microbatches for which the share is computed
_PHASES: tuple[Phase, Phase] = ("forward", "backward")
StageSeconds = list[tuple[float, float]]  # forward and backward pass of each stage, for one microbatch


class PrefixSums:
    """Sums over ranges of a sequence, each computed by one subtraction."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sums = [0.0, *accumulate(values)]

    def of(self, begin: int, end: int) -> float:
        return self._sums[end] - self._sums[begin]


@dataclass(frozen=True)
class PieceSums:
    """The pieces of one rank, with sums over consecutive pieces: `weights` are bytes of weights, `trained` those that
    are not frozen, `saved` are bytes of activations per sample that are saved for the backward pass, `experts` are
    bytes of the weights of experts."""

    pieces: tuple[PieceSummary, ...]
    weights: PrefixSums
    trained: PrefixSums
    saved: PrefixSums
    experts: PrefixSums


def in_flight(candidate: Candidate, rank: int) -> int:
    """The number of microbatches whose activations a rank stores at once. A microbatch counts once for each stage of
    the rank."""
    ranks, count, stages = candidate.sizes.pipeline, candidate.microbatches, candidate.stages_per_rank
    if ranks == 1:
        return 1
    if candidate.schedule == "gpipe":
        return count
    warm_up = (2 if candidate.schedule == "interleaved_1f1b" else 1) * (ranks - 1 - rank)
    if candidate.schedule == "zero_bubble":
        warm_up += rank  # activations are kept until the weight gradients are computed
    return min((stages - 1) * ranks + warm_up + 1, stages * count)


def span_lower_bound(candidate: Candidate, seconds: StageSeconds) -> float:
    """A lower bound of the seconds from the first forward pass to the last backward pass. `seconds` are those of each
    stage."""
    ranks, count = candidate.sizes.pipeline, candidate.microbatches
    # Weight gradients fill the bubble, unless a backward pass is not split (`Runtime.splits_backward`).
    delays_weight_gradients = candidate.schedule == "zero_bubble" and candidate.recompute == "none"
    span = delay = 0.0
    for rank in range(ranks):
        busy = sum(forward + backward for forward, backward in seconds[rank::ranks])
        span = max(span, count * busy + delay)
        forward, backward = seconds[rank]
        delay += forward if delays_weight_gradients else forward + backward
    return span


@dataclass(frozen=True)
class PassSeconds:
    """The seconds of all forward and backward passes of a step (`span_s`), and the seconds of the passes of one
    microbatch on a mean pipeline rank."""

    span_s: float
    forward_s: float
    backward_s: float


@dataclass
class CompiledShares:
    """How long the device computes compiled code, as a share of eager code, for one model on one cluster."""

    summary: ModelSummary
    inputs: PlanningInputs
    _known: dict[int, float] = field(default_factory=dict)

    def share(self, candidate: Candidate) -> float:
        """The share for a candidate, with the nearest microbatch; 1 if nothing of its code can be compiled."""
        blocks = bool(self.summary.profile.blocks)
        choices = compilations(candidate.sizes, candidate.recompute, self.inputs, blocks)
        if all(choice["compile"] == "none" and not choice["cuda_graphs"] for choice in choices):
            return 1.0
        return self._of(min(_SAMPLES, key=lambda samples: abs(samples - candidate.microbatch_samples)))

    def least(self) -> float:
        return min(map(self._of, _SAMPLES))

    def _of(self, samples: int) -> float:
        if samples not in self._known:
            whole, profile = Plan(compute=Compute(compile="model")), self.summary.profile
            eager, compiled = (
                sum(pass_s(executed, phase, samples, self.summary.speeds, False)[0] for phase in _PHASES)
                for executed in (profile, compiled_profile(profile, whole, samples))
            )
            self._known[samples] = min(1.0, compiled / eager) if eager else 1.0
        return self._known[samples]
