"""Lower bounds ("floors") of the memory and the step time of a candidate, and a guess of its step time. A candidate
that the floors exclude is never simulated.

Memory: the maximum over the first and the last rank of a pipeline (`floor`), and at least `states` of a mean rank:

    states  = (W + state · T) / n + max(W' + G', gradients and temporaries of the optimizer)        _states_bytes
              state: bytes of optimizer state per byte of weights. W: bytes of a rank's weights, divided by the tensor
              axis. T: those of them that are not frozen. n: size of the shard axis. W', G': bytes of weights and
              gradients that a rank needs in full during the backward pass at this level of sharding
    floor   = states + saved activations · microbatches in flight                                   memory_floor

Time, with c = f + b the seconds of a stage (forward f, backward b), divided by the tensor axis, and m microbatches:

    span    = max over ranks k of  m · c_k + Σ over ranks before k of (c, or f if weight gradients
              are delayed)                                                                          span_lower_bound
    floor   = span, without the wide layers that are split, because splitting makes them faster by
              an unknown factor (larger products of thinner weights)                                _wide_layers_s
    guess   = span + all-reduces of the tensor axis + transfers between stages + exposed gradient
              communication + optimizer                                                             _communication_s

With branches on different ranks, both floors are maxima over the ranks of the tensor axis (branch_placement.py):

    floor   = max over ranks of (states + saved);  m · max over ranks of c         memory_floor, _placed_branches_bounds

The guess decides in which order candidates are simulated and when the search ends (search.py). Before that, only the
floors exclude candidates.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshwright.blocks.module_names import is_inside
from meshwright.cluster.cluster import Collective
from meshwright.planner.branch_placement import branch_ranks, rank_pieces, rank_seconds, shared_groups
from meshwright.planner.candidates import AxisSizes, Candidate
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary, PieceSummary, WeightBytes, weight_bytes
from meshwright.planner.pipeline_bounds import (
    CompiledShares,
    PassSeconds,
    PieceSums,
    PrefixSums,
    StageSeconds,
    in_flight,
    span_lower_bound,
)
from meshwright.planner.unequal.division import slowdown
from meshwright.simulator.communication.collectives import collective_s, overlap
from meshwright.simulator.communication.placement import RankGroup, group_of_axes
from meshwright.simulator.experts import expert_group, gathered_share, routed_bytes

# The share of a backward pass that gradient communication overlaps in a guess. It is less than 1, because the last
# bucket is ready only at the end of the pass. This chosen value affects which candidates are simulated and in which
# order, but no prediction.
_OVERLAPPED = 0.8

# Lower bounds as shares of estimates. Chosen values; tests compare bounds with predictions.
_FLOOR_OF_COMPILED = 0.8
_SAVED_BY_COMPILED = 0.5  # of the bytes that eager code saves for the backward pass
_FLOOR = {"none": 0.98, "selective": 0.85, "full": 0.9}

# What the passes of a candidate depend on, beside the tensor and the pipeline axis.
_PASS_FIELDS = ("recompute", "schedule", "stages_per_rank", "microbatches", "microbatch_samples")

_Stages = list[tuple[int, int]]  # [begin, end): the pieces of each stage


@dataclass(frozen=True)
class Bounds:
    """Bounds of one candidate. It needs at least `memory_bytes` of memory and `floor_s` seconds per step. `guess_s` is
    a guess of its seconds per step."""

    memory_bytes: float
    floor_s: float
    guess_s: float


@dataclass
class BoundCalculator:
    """Computes the bounds of candidates for one model on one cluster."""

    summary: ModelSummary
    inputs: PlanningInputs
    _piece_seconds: dict[float, tuple[PrefixSums, PrefixSums, PrefixSums]] = field(default_factory=dict)
    _collective_seconds: dict[tuple[Collective, float, RankGroup], float] = field(default_factory=dict)
    _stage_ranges: dict[tuple[int, str], _Stages] = field(default_factory=dict)
    _groups: dict[tuple[AxisSizes, tuple[str, ...]], RankGroup] = field(default_factory=dict)
    _pass_seconds: dict[tuple[Any, ...], PassSeconds] = field(default_factory=dict)
    _largest_weights: dict[tuple[Any, ...], WeightBytes] = field(default_factory=dict)
    _piece_sums: dict[tuple[int, str], PieceSums] = field(default_factory=dict)
    _gathered: dict[tuple[int, float], float] = field(default_factory=dict)
    _states: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _routed: dict[float, list[tuple[float, float, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sent = sorted(piece.sent_bytes for piece in self.summary.pieces if piece.cuttable)
        self._median_sent_bytes = sent[len(sent) // 2] if sent else 0.0
        self._slowdown = slowdown(self.summary, self.inputs)
        self._compiled = CompiledShares(self.summary, self.inputs)
        may_compile = self.inputs.cluster.kind == "cuda" and self.inputs.allow != "same"
        self._saved_share = _SAVED_BY_COMPILED if may_compile else 1.0

    def bounds(self, candidate: Candidate) -> Bounds | None:
        """Returns the bounds of a candidate, or None if the model cannot be cut into the candidate's number of
        stages."""
        if candidate.sizes.placed_branches:
            return self._placed_branches_bounds(candidate)
        candidate = candidate.without_context
        stages = self._stages(candidate)
        if stages is None:
            return None
        passes = self._passes(candidate, stages)
        share = self._compiled.share(candidate)
        guess_s = self._slowdown * share * passes.span_s + self._communication_s(candidate, stages, passes)
        floor_s = passes.span_s - (self._wide_layers_s(candidate) if candidate.sizes.splits_wide_layers else 0.0)
        floor_s *= _FLOOR_OF_COMPILED * self._compiled.least() if share < 1 else _FLOOR[candidate.recompute]
        return Bounds(self.memory_floor(candidate, stages), floor_s, guess_s)

    def _stages(self, candidate: Candidate) -> _Stages | None:
        pieces = len(self.summary.pieces)
        if candidate.sizes.pipeline == 1:
            return [(0, pieces)]
        cuts = self.summary.cuts(candidate.stages, candidate.recompute)
        if cuts is None:
            return None
        key = (candidate.stages, candidate.recompute)
        if key not in self._stage_ranges:
            self._stage_ranges[key] = list(pairwise([0, *(piece + 1 for piece in cuts), pieces]))
        return self._stage_ranges[key]

    # ---- memory

    def states_bytes(self, sizes: AxisSizes) -> float:
        """Bytes of weights, gradients and optimizer state of a mean pipeline rank or, if branches are placed, of the
        rank with most. They depend only on the axis sizes."""
        if sizes.placed_branches:
            return max(
                self._states_bytes(sizes, weight_bytes(pieces), pieces) for pieces in self._rank_pieces(sizes, "none")
            )
        sizes = sizes.without_context
        total = self._rank_weights(sizes, [(0, len(self.summary.pieces))])
        return self._states_bytes(sizes, WeightBytes(*(size / sizes.pipeline for size in total)))

    def _states_bytes(
        self, sizes: AxisSizes, weights: WeightBytes, pieces: tuple[PieceSummary, ...] | None = None
    ) -> float:
        """Bytes of weights, gradients and optimizer state of a rank with these weights. Their peak is in the backward
        pass, with gathered weights and unsharded gradients, or in the optimizer's step, with its temporaries."""
        optimizer, offload = self.inputs.optimizer, self.inputs.offload
        trained = weights.trained / sizes.shard
        weights_and_state = weights.all / sizes.shard + trained * optimizer.state_ratio
        in_optimizer = trained * (1 + (optimizer.temporary_ratio if optimizer.multi_tensor else 0.0))
        if offload == "parameters":
            return self._gathered_bytes(sizes.tensor, pieces)
        if offload == "optimizer":
            weights_and_state, in_optimizer = weights.all / sizes.shard, trained
        if sizes.shard == 1:
            return weights_and_state + max(trained, in_optimizer)
        share = gathered_share(sizes.axes)
        gathered = weights.all - (1 - share) * weights.experts
        if sizes.sharding == "parameters":
            gathered = self._gathered_bytes(sizes.tensor, pieces, share)
        on_others = (1 - 1 / sizes.expert) * weights.experts  # a lower bound: they count as trained
        gradients = max(0.0, weights.trained - on_others) if sizes.sharding == "optimizer" else trained
        return weights_and_state + max(gathered + gradients, in_optimizer)

    def _gathered_bytes(
        self, tensor: int, pieces: tuple[PieceSummary, ...] | None = None, expert_share: float = 1.0
    ) -> float:
        """A lower bound of the bytes of gathered weights if parameters are sharded: the weights of one block, the flat
        buffer into which the weights of the next block are gathered, and the copy of that buffer. Of the weights of
        experts, `expert_share` is gathered."""
        if pieces is None and (tensor, expert_share) in self._gathered:
            return self._gathered[tensor, expert_share]
        blocks = set(self.summary.profile.blocks)
        rank_pieces = pieces or self.summary.rank_pieces(tensor, "none")
        block_bytes = [
            piece.weight_bytes - (1 - expert_share) * piece.expert_bytes
            for piece in rank_pieces
            if piece.name in blocks and piece.weight_bytes
        ]
        gathered = min(block_bytes) + 2 * max(block_bytes) if block_bytes else 0.0
        if pieces is None:
            self._gathered[tensor, expert_share] = gathered
        return gathered

    def _sums(self, tensor: int, recompute: str) -> PieceSums:
        pieces = self.summary.rank_pieces(tensor, recompute)
        sums = self._piece_sums.get((tensor, recompute))
        if sums is None or sums.pieces is not pieces:  # a profile was added since, which changed the pieces
            sums = PieceSums(
                pieces,
                PrefixSums([piece.weight_bytes for piece in pieces]),
                PrefixSums([piece.trained_bytes for piece in pieces]),
                PrefixSums([piece.saved_bytes for piece in pieces]),
                PrefixSums([piece.expert_bytes for piece in pieces]),
            )
            self._piece_sums[tensor, recompute] = sums
        return sums

    def _rank_weights(self, sizes: AxisSizes, stages: _Stages) -> WeightBytes:
        """The bytes of weights of a rank that has these pipeline stages, before sharding. If wide layers are split, the
        trained ones are a lower bound: the wide layers count as trained."""
        sums = self._sums(sizes.tensor, "none")
        weights = sum(sums.weights.of(*stage) for stage in stages)
        trained = sum(sums.trained.of(*stage) for stage in stages)
        if sizes.expert > 1:
            experts = sum(sums.experts.of(*stage) for stage in stages)
            if sizes.shard > 1:  # a rank has as many shards of experts as without an expert axis (experts.py)
                return WeightBytes(weights, trained, experts)
            on_others = (1 - 1 / sizes.expert) * experts
            return WeightBytes(weights - on_others, max(0.0, trained - on_others))
        if not sizes.splits_wide_layers or self.summary.wide_layers is None:
            return WeightBytes(weights, trained)
        elsewhere = weights * self.summary.wide_layers.weight_share * (1 - 1 / sizes.replicate)
        return WeightBytes(weights - elsewhere, max(0.0, trained - elsewhere))

    def _largest_rank_weights(self, candidate: Candidate, stages: _Stages) -> WeightBytes:
        """The bytes of weights of the pipeline rank that has most, before sharding."""
        sizes = candidate.sizes
        replicate = sizes.splits_wide_layers and sizes.replicate
        divided = sizes.shard == 1 and sizes.expert
        key = (sizes.tensor, replicate, divided, sizes.pipeline, candidate.stages, candidate.recompute)
        if key not in self._largest_weights:
            self._largest_weights[key] = max(
                self._rank_weights(sizes, stages[rank :: sizes.pipeline]) for rank in range(sizes.pipeline)
            )
        return self._largest_weights[key]

    def _rank_pieces(self, sizes: AxisSizes, recompute: str) -> list[tuple[PieceSummary, ...]]:
        """The pieces of each rank of the tensor axis if branches are placed on it."""
        ranks = branch_ranks(self.summary, self.inputs, sizes.axes, sizes.placed_branches)
        return rank_pieces(self.summary, ranks, sizes.tensor, sizes.splits_shared_layers, recompute)

    def memory_floor(self, candidate: Candidate, stages: _Stages | None = None) -> float:
        """A lower bound of the candidate's memory: that of the first or the last rank of the pipeline, whichever is
        larger (the last one keeps the model's outputs), or of the rank with most if branches are placed."""
        candidate = candidate.without_context
        sizes, ranks = candidate.sizes, candidate.sizes.pipeline
        if sizes.placed_branches:
            return max(
                self._states_bytes(sizes, weight_bytes(pieces), pieces)
                + candidate.microbatch_samples * sum(piece.saved_bytes for piece in pieces)
                for pieces in self._rank_pieces(sizes, candidate.recompute)
            )
        stages = stages or self._stages(candidate) or []
        saved = self._sums(sizes.tensor, candidate.recompute).saved
        if (sizes,) not in self._states:
            self._states[sizes,] = self.states_bytes(sizes)
        floor = self._states[sizes,]
        for rank in {0, ranks - 1}:
            rank_stages = stages[rank::ranks]
            saved_bytes = sum(saved.of(*stage) for stage in rank_stages) * in_flight(candidate, rank) / len(rank_stages)
            key = (sizes, candidate.stages, candidate.recompute, rank)  # which decide the cuts
            if key not in self._states:
                self._states[key] = self._states_bytes(sizes, self._rank_weights(sizes, rank_stages))
            floor = max(floor, self._states[key] + self._saved_share * saved_bytes * candidate.microbatch_samples)
        return floor

    # ---- time

    def _placed_branches_bounds(self, candidate: Candidate) -> Bounds:
        sizes, summary, batch = candidate.sizes, self.summary, candidate.microbatch_samples
        ranks = branch_ranks(summary, self.inputs, sizes.axes, sizes.placed_branches)
        seconds = rank_seconds(summary, ranks, sizes.tensor, sizes.splits_shared_layers, candidate.recompute, batch)
        forward, backward = max(seconds, key=sum)
        span = candidate.microbatches * (forward + backward)
        weights = max(map(weight_bytes, self._rank_pieces(sizes, candidate.recompute)))
        guess = span + self._optimizer_s(sizes, weights.trained)
        if sizes.splits_shared_layers:
            groups = len(shared_groups(summary, ranks))
            all_reduce_s = self._collective_s("all_reduce", self._median_sent_bytes * batch, sizes, "tensor")
            guess += 2 * all_reduce_s * groups * candidate.microbatches
        if sizes.data_ranks > 1:
            guess += self._gradients_s(candidate, weights, PassSeconds(span, forward, backward))
        return Bounds(self.memory_floor(candidate), span, guess)

    def _stage_seconds(self, candidate: Candidate, stages: _Stages) -> StageSeconds:
        batch, summary = candidate.microbatch_samples, self.summary
        if batch not in self._piece_seconds:
            seconds = summary.piece_seconds(batch)
            repeated = [f if piece.recomputable else 0.0 for piece, (f, _) in zip(summary.pieces, seconds, strict=True)]
            self._piece_seconds[batch] = (
                PrefixSums([f for f, _ in seconds]),
                PrefixSums([b for _, b in seconds]),
                PrefixSums(repeated),
            )
        forward, backward, recomputed = self._piece_seconds[batch]
        split = 1.0 if summary.has_sequence else summary.split_flop_share
        rank_part = split / candidate.sizes.tensor + 1 - split
        share = summary.recomputed_share(candidate.recompute)
        return [
            (forward.of(*stage) * rank_part, (backward.of(*stage) + share * recomputed.of(*stage)) * rank_part)
            for stage in stages
        ]

    def _passes(self, candidate: Candidate, stages: _Stages) -> PassSeconds:
        """Returns the seconds of the candidate's passes. They are cached without the replicate and shard axes, because
        they do not depend on these."""
        sizes = candidate.sizes
        key = (sizes.tensor, sizes.pipeline, *(getattr(candidate, name) for name in _PASS_FIELDS))
        if key not in self._pass_seconds:
            seconds = self._stage_seconds(candidate, stages)
            forward, backward = (sum(both) / sizes.pipeline for both in zip(*seconds, strict=True))
            self._pass_seconds[key] = PassSeconds(span_lower_bound(candidate, seconds), forward, backward)
        return self._pass_seconds[key]

    def _wide_layers_s(self, candidate: Candidate) -> float:
        """The seconds of all passes of the pieces that contain wide layers, if these are not split."""
        assert self.summary.wide_layers is not None
        modules = self.summary.wide_layers.modules
        piece_seconds = self.summary.piece_seconds(candidate.microbatch_samples)
        one_microbatch = sum(
            sum(seconds)
            for piece, seconds in zip(self.summary.pieces, piece_seconds, strict=True)
            if any(is_inside(module, piece.name) for module in modules)
        )
        return candidate.microbatches * one_microbatch

    def _communication_s(self, candidate: Candidate, stages: _Stages, passes: PassSeconds) -> float:
        """The guessed seconds of the optimizer's step and of the communication that does not overlap with the
        passes."""
        sizes = candidate.sizes
        weights = self._largest_rank_weights(candidate, stages)
        seconds = self._optimizer_s(sizes, weights.trained)
        sent_bytes = self._median_sent_bytes * candidate.microbatch_samples
        if sizes.tensor > 1:  # one all-reduce for each group of split modules, forward and backward
            all_reduce_s = self._collective_s("all_reduce", sent_bytes, sizes, "tensor")
            seconds += 2 * all_reduce_s * self.summary.split_group_count / sizes.pipeline * candidate.microbatches
        if sizes.pipeline > 1:
            send_s = self._collective_s("point_to_point", sent_bytes / sizes.tensor, sizes, "pipeline")
            rounds = -(-candidate.microbatches // sizes.pipeline)
            seconds += 2 * send_s * (sizes.pipeline - 1) * rounds * candidate.stages_per_rank
        if sizes.data_ranks > 1:
            seconds += self._gradients_s(candidate, weights, passes)
        if sizes.expert > 1:
            seconds += self._experts_s(candidate)
        if sizes.splits_wide_layers:
            seconds += self._wide_layers_communication_s(candidate)
        return seconds

    def _experts_s(self, candidate: Candidate) -> float:
        """The seconds of sending tokens to experts and back, in both passes."""
        sizes, batch = candidate.sizes, candidate.microbatch_samples
        group = expert_group(sizes.axes, self.inputs.cluster)
        one_microbatch = sum(
            4 * times * collective_s("all_to_all", rows, group, self.inputs.cluster)
            for rows, _, times in self._routed_bytes(batch)
        )
        return one_microbatch / sizes.pipeline * candidate.microbatches

    def _routed_bytes(self, batch: float) -> list[tuple[float, float, int]]:
        if batch not in self._routed:
            self._routed[batch] = routed_bytes(self.summary.profile, batch)
        return self._routed[batch]

    def _optimizer_s(self, sizes: AxisSizes, trained_bytes: float) -> float:
        """The seconds of the optimizer's step, which is limited by memory bandwidth: it reads weights, gradients and
        state, and writes weights and state."""
        moved_bytes = trained_bytes / sizes.shard * (3 + 2 * self.inputs.optimizer.state_ratio)
        return moved_bytes / max(self.summary.device.bandwidth_bytes_per_s, 1.0)

    def _gradients_s(self, candidate: Candidate, weights: WeightBytes, passes: PassSeconds) -> float:
        """The seconds of averaging gradients and gathering sharded weights that do not overlap with a rank's passes."""
        sizes, kind = candidate.sizes, self.inputs.cluster.kind
        forward, backward = passes.forward_s, passes.backward_s
        all_reduce = self._collective_s("all_reduce", weights.trained / sizes.shard, sizes, "replicate")
        if sizes.shard == 1:
            return overlap(_OVERLAPPED * backward, all_reduce, kind).exposed_s
        elsewhere = (1 - gathered_share(sizes.axes)) * weights.experts
        gather = self._collective_s("all_gather", weights.all - elsewhere, sizes, "shard")
        scatter = self._collective_s("reduce_scatter", max(0.0, weights.trained - elsewhere), sizes, "shard")
        if sizes.sharding == "optimizer":
            exposed = overlap(_OVERLAPPED * backward, all_reduce + scatter, kind).exposed_s
            return exposed + overlap(forward, gather, kind).exposed_s
        exposed = overlap(_OVERLAPPED * backward, all_reduce, kind).exposed_s
        if sizes.sharding == "gradients":
            exposed += overlap(forward, gather, kind).exposed_s
            return exposed + candidate.microbatches * overlap(backward, scatter, kind).exposed_s
        both_passes = overlap(forward, gather, kind).exposed_s + overlap(backward, gather + scatter, kind).exposed_s
        return exposed + candidate.microbatches * both_passes

    def _wide_layers_communication_s(self, candidate: Candidate) -> float:
        """The seconds of gathering the inputs of split wide layers, and of scattering the gradients of these inputs."""
        assert self.summary.wide_layers is not None
        shapes = {name: p.shape for p in self.summary.profile.parameters for name in p.names}
        item_bytes = 2 if self.summary.profile.precision in ("bf16", "fp16", "fp8") else 4
        features = sum(shapes[f"{module}.weight"][1] for module in self.summary.wide_layers.modules)
        gathered = features * item_bytes * candidate.microbatch_samples * candidate.sizes.replicate
        return 2 * self._collective_s("all_gather", gathered, candidate.sizes, "replicate") * candidate.microbatches

    def _collective_s(self, kind: Collective, size: float, sizes: AxisSizes, *axes: str) -> float:
        group_key = (sizes, axes)
        if group_key not in self._groups:
            self._groups[group_key] = group_of_axes(sizes.axes, axes, self.inputs.cluster)
        key = (kind, size, self._groups[group_key])
        if key not in self._collective_seconds:
            self._collective_seconds[key] = collective_s(kind, size, self._groups[group_key], self.inputs.cluster)
        return self._collective_seconds[key]
