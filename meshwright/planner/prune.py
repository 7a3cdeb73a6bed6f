"""Bounds: how much memory and time a candidate needs at least. What they exclude is never written out or priced.

Memory of the first and the last rank of a pipeline, and no less than a mean rank's weights:

    held    = (1 + state) · W / n + max(W' + G', gradients and temporaries of the optimizer)            _held
              W weights after the tensor axis; W', G' what a sharding level of n leaves whole of weights, gradients
    floor   = held + saved · in flight                                                                  memory_floor

Time, with c the seconds of a stage (forward f, backward b) after the tensor axis, and m microbatches:

    span    = max over ranks k of  m · c_k + Σ before k of (c, or f where gradients of weights wait)    _span
    floor   = span, less the wide layers that are split: larger products of thinner weights are faster  _wide_s
    guess   = span + all-reduces of the tensor axis + transfers + gradients that nothing hides
              + optimizer                                                                               _more

Of branches that live on different ranks, both are those of the rank with most (placing.py):

    floor   = max over ranks of (held + saved);  m · max over ranks of c                     memory_floor, _apart

The guess orders what is priced; only the floors exclude.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from meshwright.blocks.module_names import within
from meshwright.cluster.cluster import Collective
from meshwright.planner.candidates import Candidate, Layout
from meshwright.planner.outline import Outline, Piece
from meshwright.planner.placing import homes, rank_pieces, rank_seconds, shared_groups
from meshwright.planner.question import Question
from meshwright.simulator.communication.collectives import collective_s, overlap
from meshwright.simulator.communication.placement import Group, group

_HIDDEN = 0.8  # of a backward pass, beside which gradients are sent: the last bucket comes with its end

_Stages = list[tuple[int, int]]  # [begin, end) of the pieces of each
_Costs = list[tuple[float, float]]  # seconds of each stage, forward and backward, for one microbatch


@dataclass(frozen=True)
class Bounds:
    """Of one candidate."""

    memory_bytes: float
    floor_s: float
    guess_s: float


@dataclass(frozen=True)
class _Passes:
    """Of all microbatches (`span_s`), and of one on a mean rank."""

    span_s: float
    forward_s: float
    backward_s: float


class Sums:
    """Of consecutive pieces, in one subtraction."""

    def __init__(self, values: Sequence[float]) -> None:
        self._until = [0.0, *accumulate(values)]

    def of(self, begin: int, end: int) -> float:
        return self._until[end] - self._until[begin]


@dataclass
class Bounder:
    """Bounds of all candidates of one outline."""

    outline: Outline
    question: Question
    _seconds: dict[int, tuple[Sums, Sums, Sums]] = field(default_factory=dict)
    _wires: dict[tuple[Collective, float, Group], float] = field(default_factory=dict)
    _groups: dict[tuple[Layout, tuple[str, ...]], Group] = field(default_factory=dict)
    _spans: dict[Candidate, _Passes] = field(default_factory=dict)
    _most: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _known: dict[tuple[int, str], tuple[tuple[Piece, ...], tuple[Sums, Sums]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sent = sorted(piece.sent for piece in self.outline.pieces if piece.cuttable)
        self._sent = sent[len(sent) // 2] if sent else 0.0

    def _sums(self, tensor: int, recompute: str) -> tuple[Sums, Sums]:
        """Weights and what is kept of a sample, of a rank's pieces."""
        pieces = self.outline.rank_pieces(tensor, recompute)
        known, found = self._known.get((tensor, recompute), ((), None))
        if found is None or known is not pieces:
            found = Sums([piece.weights for piece in pieces]), Sums([piece.saved for piece in pieces])
            self._known[tensor, recompute] = pieces, found
        return found

    def bounds(self, candidate: Candidate) -> Bounds | None:
        """None where the model cannot be cut into as many stages."""
        if candidate.layout.apart:
            return self._apart(candidate)
        stages = self._stages(candidate)
        if stages is None:
            return None
        passes = self._passes(candidate, stages)
        guess_s = passes.span_s + self._more(candidate, stages, passes)
        floor_s = passes.span_s - (self._wide_s(candidate) if candidate.layout.wide else 0.0)
        return Bounds(self.memory_floor(candidate, stages), floor_s, guess_s)

    def _stages(self, candidate: Candidate) -> _Stages | None:
        pieces = len(self.outline.pieces)
        if candidate.layout.pipeline == 1:
            return [(0, pieces)]
        cuts = self.outline.cuts(candidate.stages, candidate.recompute)
        if cuts is None:
            return None
        edges = [0, *(piece + 1 for piece in cuts), pieces]
        return list(pairwise(edges))

    # ---- memory

    def states_bytes(self, layout: Layout) -> float:
        """Weights, gradients and optimizer state of a mean rank: before anything else is chosen."""
        if layout.apart:
            return max(self._held(layout, _weights(own), own) for own in self._rank_pieces(layout, "none"))
        return self._held(layout, self._rank_weights(layout, [(0, len(self.outline.pieces))]) / layout.pipeline)

    def _rank_weights(self, layout: Layout, stages: _Stages) -> float:
        weights, _ = self._sums(layout.tensor, "none")
        whole = sum(weights.of(*stage) for stage in stages)
        if not layout.wide or self.outline.wide is None:
            return whole
        return whole * (1 - self.outline.wide.weight_share * (1 - 1 / layout.replicate))

    def _most_weights(self, candidate: Candidate, stages: _Stages) -> float:
        layout = candidate.layout
        key = (layout.tensor, layout.wide and layout.replicate, layout.pipeline, candidate.stages, candidate.recompute)
        if key not in self._most:
            self._most[key] = max(
                self._rank_weights(layout, stages[rank :: layout.pipeline]) for rank in range(layout.pipeline)
            )
        return self._most[key]

    def _rank_pieces(self, layout: Layout, recompute: str) -> list[tuple[Piece, ...]]:
        """Of each rank that branches live on."""
        where = homes(self.outline, self.question, layout.axes, layout.apart)
        return rank_pieces(self.outline, where, layout.tensor, layout.beside, recompute)

    def _held(self, layout: Layout, weights: float, pieces: tuple[Piece, ...] | None = None) -> float:
        """With what is gathered and combined in a backward pass, or with the temporaries of the optimizer's step."""
        optimizer = self.question.optimizer
        part = weights / layout.shard
        held = part * (1 + optimizer.state)
        step = part * (1 + (optimizer.temporary if optimizer.at_once else 0.0))
        if layout.shard == 1:
            return held + max(weights, step)
        gathered = weights if layout.sharding != "parameters" else self._gathered_bytes(layout.tensor, pieces)
        return held + max(gathered + (weights if layout.sharding == "optimizer" else part), step)

    def _gathered_bytes(self, tensor: int, pieces: tuple[Piece, ...] | None = None) -> float:
        """A block's weights, the flat buffer of the next one's, and what they are copied into."""
        blocks, own = set(self.outline.profile.blocks), pieces or self.outline.rank_pieces(tensor, "none")
        sizes = [piece.weights for piece in own if piece.name in blocks and piece.weights]
        return min(sizes) + 2 * max(sizes) if sizes else 0.0

    def memory_floor(self, candidate: Candidate, stages: _Stages | None = None) -> float:
        """Of the first rank of a pipeline and the last, which keeps the scores."""
        layout, ranks = candidate.layout, candidate.layout.pipeline
        if layout.apart:
            return max(
                self._held(layout, _weights(own), own) + candidate.batch * sum(piece.saved for piece in own)
                for own in self._rank_pieces(layout, candidate.recompute)
            )
        stages = stages or self._stages(candidate) or []
        _, saved = self._sums(layout.tensor, candidate.recompute)
        most = self.states_bytes(layout)
        for rank in {0, ranks - 1}:
            own = stages[rank::ranks]
            kept = sum(saved.of(*stage) for stage in own) * _in_flight(candidate, rank) / len(own)
            most = max(most, self._held(layout, self._rank_weights(layout, own)) + kept * candidate.batch)
        return most

    # ---- time

    def _apart(self, candidate: Candidate) -> Bounds:
        layout, outline = candidate.layout, self.outline
        where = homes(outline, self.question, layout.axes, layout.apart)
        own = rank_seconds(outline, where, layout.tensor, layout.beside, candidate.recompute, candidate.batch)
        forward, backward = max(own, key=sum)
        span = candidate.microbatches * (forward + backward)
        weights = max(map(_weights, self._rank_pieces(layout, candidate.recompute)))
        guess = span + self._optimizer_s(layout, weights)
        if layout.beside:
            groups = len(shared_groups(outline, where))
            across = self._priced("all_reduce", self._sent * candidate.batch, layout, "tensor")
            guess += 2 * across * groups * candidate.microbatches
        if layout.samplers > 1:
            guess += self._gradients_s(candidate, weights, _Passes(span, forward, backward))
        return Bounds(self.memory_floor(candidate), span, guess)

    def _costs(self, candidate: Candidate, stages: _Stages) -> _Costs:
        if candidate.batch not in self._seconds:
            seconds = self.outline.seconds(candidate.batch)
            again = [f if piece.again else 0.0 for piece, (f, _) in zip(self.outline.pieces, seconds, strict=True)]
            self._seconds[candidate.batch] = Sums([f for f, _ in seconds]), Sums([b for _, b in seconds]), Sums(again)
        forward, backward, again_s = self._seconds[candidate.batch]
        divided = 1.0 if self.outline.has_sequence else self.outline.divided_work
        part = divided / candidate.layout.tensor + 1 - divided
        more = self.outline.again(candidate.recompute)
        return [
            (forward.of(*stage) * part, (backward.of(*stage) + more * again_s.of(*stage)) * part) for stage in stages
        ]

    def _passes(self, candidate: Candidate, stages: _Stages) -> _Passes:
        """How replicas and shards are arranged makes no difference to them."""
        layout = candidate.layout
        key = replace(candidate, layout=Layout(layout.tensor, layout.pipeline))
        if key not in self._spans:
            costs = self._costs(candidate, stages)
            forward, backward = (sum(both) / layout.pipeline for both in zip(*costs, strict=True))
            self._spans[key] = _Passes(_span(candidate, costs), forward, backward)
        return self._spans[key]

    def _wide_s(self, candidate: Candidate) -> float:
        """All passes of the pieces with wide layers, undivided."""
        assert self.outline.wide is not None
        modules = self.outline.wide.modules
        one = sum(
            sum(seconds)
            for piece, seconds in zip(self.outline.pieces, self.outline.seconds(candidate.batch), strict=True)
            if any(within(module, piece.name) for module in modules)
        )
        return candidate.microbatches * one

    def _more(self, candidate: Candidate, stages: _Stages, passes: _Passes) -> float:
        layout = candidate.layout
        weights = self._most_weights(candidate, stages)
        seconds = self._optimizer_s(layout, weights)
        if layout.tensor > 1:
            # one in each pass of each group
            across = self._priced("all_reduce", self._sent * candidate.batch, layout, "tensor")
            seconds += 2 * across * self.outline.splits / layout.pipeline * candidate.microbatches
        if layout.pipeline > 1:
            one = self._priced("point_to_point", self._sent * candidate.batch / layout.tensor, layout, "pipeline")
            rounds = -(-candidate.microbatches // layout.pipeline)
            seconds += 2 * one * (layout.pipeline - 1) * rounds * candidate.stages_per_rank
        if layout.samplers > 1:
            seconds += self._gradients_s(candidate, weights, passes)
        if layout.wide:
            seconds += self._gathered_s(candidate)
        return seconds

    def _optimizer_s(self, layout: Layout, weights: float) -> float:
        """It reads weights, gradients and state, writes weights and state."""
        moved = weights / layout.shard * (3 + 2 * self.question.optimizer.state)
        return moved / max(self.outline.device.bandwidth_bytes_per_s, 1.0)

    def _gradients_s(self, candidate: Candidate, weights: float, passes: _Passes) -> float:
        """What of combining gradients and gathering weights shows beside the passes of a rank."""
        layout, kind = candidate.layout, self.question.cluster.kind
        forward, backward = passes.forward_s, passes.backward_s
        combine = self._priced("all_reduce", weights / layout.shard, layout, "replicate")
        if layout.shard == 1:
            return overlap(_HIDDEN * backward, combine, kind).exposed_s
        gather = self._priced("all_gather", weights, layout, "shard")
        scatter = self._priced("reduce_scatter", weights, layout, "shard")
        if layout.sharding == "optimizer":
            late = overlap(_HIDDEN * backward, combine + scatter, kind).exposed_s
            return late + overlap(forward, gather, kind).exposed_s
        late = overlap(_HIDDEN * backward, combine, kind).exposed_s
        if layout.sharding == "gradients":
            late += overlap(forward, gather, kind).exposed_s
            return late + candidate.microbatches * overlap(backward, scatter, kind).exposed_s
        both = overlap(forward, gather, kind).exposed_s + overlap(backward, gather + scatter, kind).exposed_s
        return late + candidate.microbatches * both

    def _gathered_s(self, candidate: Candidate) -> float:
        """The input of each wide layer is gathered, and the gradient of it is scattered back."""
        assert self.outline.wide is not None
        sizes = {name: p.shape for p in self.outline.profile.parameters for name in p.names}
        item = 2 if self.outline.profile.precision in ("bf16", "fp16") else 4
        features = sum(sizes[f"{module}.weight"][1] for module in self.outline.wide.modules)
        gathered = features * item * candidate.batch * candidate.layout.replicate
        return 2 * self._priced("all_gather", gathered, candidate.layout, "replicate") * candidate.microbatches

    def _priced(self, kind: Collective, size: float, layout: Layout, *names: str) -> float:
        where = (layout, names)
        if where not in self._groups:
            self._groups[where] = group(layout.axes, names, self.question.cluster)
        key = (kind, size, self._groups[where])
        if key not in self._wires:
            self._wires[key] = collective_s(kind, size, self._groups[where], self.question.cluster)
        return self._wires[key]


def _weights(pieces: tuple[Piece, ...]) -> float:
    return float(sum(piece.weights for piece in pieces))


def _in_flight(candidate: Candidate, rank: int) -> int:
    """How many microbatches, of any of its stages, a rank holds at once."""
    ranks, count, stages = candidate.layout.pipeline, candidate.microbatches, candidate.stages_per_rank
    if ranks == 1:
        return 1
    if candidate.schedule == "gpipe":
        return count
    further = (2 if candidate.schedule == "interleaved_1f1b" else 1) * (ranks - 1 - rank)
    if candidate.schedule == "zero_bubble":
        further += rank  # until the gradients of weights are done, what they need stays
    return min((stages - 1) * ranks + further + 1, stages * count)


def _span(candidate: Candidate, costs: _Costs) -> float:
    ranks, count = candidate.layout.pipeline, candidate.microbatches
    early = candidate.schedule == "zero_bubble"  # gradients of the weights fill the waits
    most = before = 0.0
    for rank in range(ranks):
        busy = sum(forward + backward for forward, backward in costs[rank::ranks])
        most = max(most, count * busy + before)
        forward, backward = costs[rank]
        before += forward if early else forward + backward
    return most
