"""Replays the tensors of one microbatch in the order in which they are allocated and freed, and finds the peak of each
pass.

With a shard axis of n ranks, weights are all-gathered block by block, and 1/n of a block's gradients stays:

    gathered   the root's weights, the current block's, and the buffers that the next block is gathered into
               (`sharding: parameters`); all weights from their first use to the end of the backward pass (other levels)
    gradients  the current block's in full while its backward pass runs; then the buffer that sends them, until the
               next block's are sent; 1/n of them stays
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshwright.profile.values import MemoryChange, ModelProfile, TraceSegment

Rounding = Callable[[float], float]
Observer = Callable[[TraceSegment, MemoryChange, float, "LiveBytes"], None]
"""Is called after every change of memory with its segment, the change, its bytes, and the bytes in memory then,
including the workspace of the operator that runs."""


@dataclass
class LiveBytes:
    """Bytes in memory at one moment: `gathered` weights, `gradients` of parameters, `buckets` from which gradients are
    sent, activations `saved` for the backward pass, `temporary` tensors, and what the allocator's `rounding` adds."""

    gathered: float = 0.0
    gradients: float = 0.0
    buckets: float = 0.0
    saved: float = 0.0
    temporary: float = 0.0
    rounding: float = 0.0

    def total(self) -> float:
        return self.gathered + self.gradients + self.buckets + self.saved + self.temporary + self.rounding

    def plus(self, other: "LiveBytes") -> "LiveBytes":
        return LiveBytes(
            self.gathered + other.gathered,
            self.gradients + other.gradients,
            self.buckets + other.buckets,
            self.saved + other.saved,
            self.temporary + other.temporary,
            self.rounding + other.rounding,
        )

    def scaled(self, factor: float) -> "LiveBytes":
        return LiveBytes(
            self.gathered * factor,
            self.gradients * factor,
            self.buckets * factor,
            self.saved * factor,
            self.temporary * factor,
            self.rounding * factor,
        )


@dataclass(frozen=True)
class MemoryMoment:
    """The bytes in memory while the part of the step named `where` runs."""

    live: LiveBytes
    where: str


@dataclass(frozen=True)
class GatheredWeights:
    """The bytes of the weights that a shard axis gathers: those of each block, and the `root_bytes` of weights outside
    of all blocks. With `keeps`, gathered weights stay from the forward to the backward pass. `part` of the gradients
    stays on the rank. `padding` is how many times as large the buffers of exchanges are as what they hold."""

    blocks: dict[str, float]
    root_bytes: float
    part: float
    keeps: bool
    padding: float = 1.0

    @property
    def all_bytes(self) -> float:
        return self.root_bytes + sum(self.blocks.values())

    @property
    def largest_block_bytes(self) -> float:
        return max(self.blocks.values(), default=0.0)


@dataclass(frozen=True)
class PassPeaks:
    """The moment with most bytes in memory in the forward pass and in the backward pass, and the bytes that stay in
    memory between the two passes (without gathered weights)."""

    forward: MemoryMoment
    backward: MemoryMoment
    saved: LiveBytes


@dataclass
class _ReplayState:
    now: LiveBytes
    peak: MemoryMoment
    unit: str = ""
    unit_gradients: float = 0.0
    block_of_layer: dict[str, str] = field(default_factory=dict)


class _ScaledChange(NamedTuple):
    """A `MemoryChange` with its bytes for one batch size, the bytes that the allocator's rounding adds, and the
    workspace of the operator that returned the tensor."""

    change: MemoryChange
    bytes: float
    rounding_bytes: float
    workspace_bytes: float


def replay(
    profile: ModelProfile,
    batch: float,
    rounding: Rounding,
    *,
    adds_gradients: bool,
    gathering: GatheredWeights | None = None,
    workspaces: bool = False,
    observe: Observer | None = None,
) -> PassPeaks:
    """The peaks of both passes of a microbatch. With `adds_gradients`, gradients are in memory from the start (in
    buckets, or from earlier microbatches); a new gradient is then a temporary tensor that is added to them.
    With `workspaces`, operators allocate the workspace that the profile states for them. With `observe`, every block is
    replayed, not only the first two and the last of equal ones."""
    kept = (adds_gradients, gathering, workspaces, observe)
    forward = _replay_pass(profile, "forward", batch, rounding, LiveBytes(), *kept)
    saved = replace(forward.now, gathered=0.0)
    start = replace(forward.now)
    backward = _replay_pass(profile, "backward", batch, rounding, start, *kept)
    return PassPeaks(forward.peak, backward.peak, saved)


def _replay_pass(
    profile: ModelProfile,
    phase: str,
    batch: float,
    rounding: Rounding,
    start: LiveBytes,
    adds_gradients: bool,
    gathering: GatheredWeights | None,
    workspaces: bool,
    observe: Observer | None,
) -> _ReplayState:
    state = _ReplayState(start, MemoryMoment(replace(start), f"start of {phase}"))
    for segment in profile.segments:
        if segment.phase != phase:
            continue
        changes = [_scaled_change(change, segment, batch, rounding, workspaces) for change in segment.changes]
        before = replace(state.now)
        for turn in range(min(segment.block_count, 3) if observe is None else segment.block_count):
            if turn == 2 and observe is None:
                # The blocks between the second and the last add as much as the second did, so the peak is in the last
                # block or in the first two.
                added = state.now.plus(before.scaled(-1.0))
                state.now = state.now.plus(added.scaled(segment.block_count - 3.0))
            before = replace(state.now)
            _replay_block(state, segment, changes, adds_gradients, gathering, profile.blocks, observe)
            if gathering is not None and segment.blocks:
                _send_gradients(state, gathering)  # each of the equal blocks sends its own gradients
    if gathering is not None:
        _send_gradients(state, gathering)
    return state


def _replay_block(
    state: _ReplayState,
    segment: TraceSegment,
    changes: list[_ScaledChange],
    adds_gradients: bool,
    gathering: GatheredWeights | None,
    blocks: tuple[str, ...],
    observe: Observer | None,
) -> None:
    for scaled in changes:
        change = scaled.change
        if gathering is not None:
            _gather(state, change.layer, gathering, blocks)
        _apply(state, scaled, adds_gradients)
        if state.now.total() + scaled.workspace_bytes > state.peak.live.total():
            now = replace(state.now, temporary=state.now.temporary + scaled.workspace_bytes)
            state.peak = MemoryMoment(now, f"{segment.phase} of {change.layer or 'the model'}")
        if observe is not None:
            with_workspace = replace(state.now, temporary=state.now.temporary + scaled.workspace_bytes)
            observe(segment, change, scaled.bytes, with_workspace)
        if change.role == "gradient" and adds_gradients:
            state.now.temporary -= scaled.bytes
            state.now.rounding -= scaled.rounding_bytes


def _scaled_change(
    change: MemoryChange, segment: TraceSegment, batch: float, rounding: Rounding, workspaces: bool
) -> _ScaledChange:
    size = change.bytes.at(batch)
    extra = rounding(size) if size > 0 else -rounding(-size)
    workspace = _workspace_bytes(segment, change, batch) if workspaces else 0.0
    return _ScaledChange(change, size * change.tensor_count, extra * change.tensor_count, workspace)


def _workspace_bytes(segment: TraceSegment, change: MemoryChange, batch: float) -> float:
    """The workspace bytes of the operator that has just returned this tensor; 0 for a change that frees a tensor."""
    is_result = change.bytes.constant + change.bytes.linear > 0 and change.after_operators
    return segment.operators[change.after_operators - 1].workspace_bytes.at(batch) if is_result else 0.0


def _apply(state: _ReplayState, scaled: _ScaledChange, adds_gradients: bool) -> None:
    now, role = state.now, scaled.change.role
    now.rounding += scaled.rounding_bytes
    if role == "saved":
        now.saved += scaled.bytes
    elif role == "temporary" or adds_gradients:
        now.temporary += scaled.bytes
    else:
        now.gradients += scaled.bytes
        state.unit_gradients += scaled.bytes


def _gather(state: _ReplayState, layer: str, gathering: GatheredWeights, blocks: tuple[str, ...]) -> None:
    if layer not in state.block_of_layer:
        state.block_of_layer[layer] = next((b for b in blocks if layer == b or layer.startswith(f"{b}.")), "")
    unit = state.block_of_layer[layer]
    if unit != state.unit:
        _send_gradients(state, gathering)
        state.unit = unit
    if gathering.keeps:
        state.now.gathered = gathering.all_bytes
    else:
        # In a block, its own weights are gathered too. The next block, assumed to be the largest, is gathered ahead,
        # which takes twice its weights: a flat buffer, and the weights that are copied out of it. Both are padded.
        ahead = 2 * gathering.padding * gathering.largest_block_bytes
        block = gathering.blocks.get(unit, 0.0) + ahead if unit else 0.0
        state.now.gathered = gathering.root_bytes + block


def _send_gradients(state: _ReplayState, gathering: GatheredWeights) -> None:
    """Reduce-scatters the gradients of a block. A buffer keeps them, padded, until the gradients of the next block are
    sent; `part` of them stays."""
    block_bytes = state.unit_gradients
    if block_bytes <= 0:
        return
    state.now.gradients -= block_bytes * (1 - gathering.part)
    state.now.buckets = block_bytes * gathering.padding
    state.unit_gradients = 0.0
