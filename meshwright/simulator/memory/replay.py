"""The tensors of one microbatch, replayed in the order in which they live and die: the largest moment of each pass.

Under a shard axis of n ranks weights are gathered block by block (`Gathering`), and gradients leave a block as 1/n:

    gathered   the root's weights, the current block's, and the buffers that fill the next one's     (parameters)
               all weights, from the first use to the end of the backward pass                       (other levels)
    gradients  a block's own, whole, while its backward pass runs; then the buffer that sends them,
               until the next block's is sent; 1/n of them stay
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from meshwright.profile.values import Change, ModelProfile, Stretch

Rounding = Callable[[float], float]


@dataclass
class Held:
    """Bytes in memory at one moment, by what they are."""

    gathered: float = 0.0
    gradients: float = 0.0
    buckets: float = 0.0
    saved: float = 0.0
    temporary: float = 0.0
    rounding: float = 0.0

    def total(self) -> float:
        return self.gathered + self.gradients + self.buckets + self.saved + self.temporary + self.rounding

    def plus(self, other: "Held") -> "Held":
        return Held(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Held)})

    def times(self, factor: float) -> "Held":
        return Held(**{f.name: getattr(self, f.name) * factor for f in fields(Held)})


@dataclass(frozen=True)
class Moment:
    held: Held
    where: str


@dataclass(frozen=True)
class Gathering:
    """Blocks with the bytes of their weights, and the `root`: what is in none. `keeps` says that nothing is given
    back between the passes; `ranks` share the gradients."""

    blocks: dict[str, float]
    root: float
    ranks: int
    keeps: bool

    @property
    def whole(self) -> float:
        return self.root + sum(self.blocks.values())

    @property
    def largest(self) -> float:
        return max(self.blocks.values(), default=0.0)


@dataclass(frozen=True)
class Passes:
    """The largest moment of a forward and of a backward pass, and what stays between them."""

    forward: Moment
    backward: Moment
    saved: Held


@dataclass
class _State:
    now: Held
    most: Moment
    unit: str = ""
    unit_gradients: float = 0.0
    block_of: dict[str, str] = field(default_factory=dict)


def replay(
    profile: ModelProfile,
    batch: int,
    rounding: Rounding,
    *,
    held: float,
    gathering: Gathering | None = None,
    workspaces: bool = False,
) -> Passes:
    """`held` gradients are there from the start (buckets, or those of earlier microbatches): a new one is then only
    added to them. With `workspaces` operators take theirs."""
    begin = Held()
    forward = _run(profile, "forward", batch, rounding, begin, held, gathering, workspaces)
    saved = replace(forward.now, gathered=0.0)
    backward = _run(profile, "backward", batch, rounding, replace(forward.now), held, gathering, workspaces)
    return Passes(forward.most, backward.most, saved)


def _run(
    profile: ModelProfile,
    phase: str,
    batch: int,
    rounding: Rounding,
    begin: Held,
    held: float,
    gathering: Gathering | None,
    workspaces: bool,
) -> _State:
    state = _State(begin, Moment(replace(begin), f"start of {phase}"))
    for stretch in profile.stretches:
        if stretch.phase != phase:
            continue
        moves = [
            (change, *_step(change, batch, rounding), _workspace(stretch, change, batch) if workspaces else 0.0)
            for change in stretch.changes
        ]
        before = replace(state.now)
        for turn in range(min(stretch.count, 3)):
            if turn == 2:
                # Each of the equal blocks between adds what the second one did: only the last can be larger.
                state.now = state.now.plus(state.now.plus(before.times(-1.0)).times(stretch.count - 3.0))
            before = replace(state.now)
            _block(state, moves, phase, held > 0, gathering, profile.blocks)
            if gathering is not None and stretch.blocks:
                _send(state, gathering)  # the next of equal blocks is another one
    if gathering is not None:
        _send(state, gathering)
    return state


_Move = tuple[Change, float, float, float]  # with its bytes, their rounding, and the workspace of its operator


def _block(
    state: _State,
    moves: list[_Move],
    phase: str,
    passing: bool,
    gathering: Gathering | None,
    blocks: tuple[str, ...],
) -> None:
    for change, size, extra, work in moves:
        if gathering is not None:
            _gather(state, change.layer, gathering, blocks)
        _take(state, change, size, extra, passing)
        if state.now.total() + work > state.most.held.total():
            now = replace(state.now, temporary=state.now.temporary + work)
            state.most = Moment(now, f"{phase} of {change.layer or 'the model'}")
        if change.role == "gradient" and passing:
            state.now.temporary -= size
            state.now.rounding -= extra


def _workspace(stretch: Stretch, change: Change, batch: int) -> float:
    """What the operator takes that has just returned this tensor."""
    taken = change.bytes.constant + change.bytes.linear > 0 and change.operator
    return stretch.operators[change.operator - 1].workspace.at(batch) if taken else 0.0


def _take(state: _State, change: Change, size: float, extra: float, passing: bool) -> None:
    now = state.now
    now.rounding += extra
    if change.role == "saved":
        now.saved += size
    elif change.role == "temporary" or passing:
        now.temporary += size
    else:
        now.gradients += size
        state.unit_gradients += size


def _gather(state: _State, layer: str, gathering: Gathering, blocks: tuple[str, ...]) -> None:
    if layer not in state.block_of:
        state.block_of[layer] = next((b for b in blocks if layer == b or layer.startswith(f"{b}.")), "")
    unit = state.block_of[layer]
    if unit != state.unit:
        _send(state, gathering)
        state.unit = unit
    if gathering.keeps:
        state.now.gathered = gathering.whole
    else:
        # In a block its own weights too, and the flat buffer and the weights that the next one's are copied into.
        inside = gathering.blocks.get(unit, 0.0) + 2 * gathering.largest if unit else 0.0
        state.now.gathered = gathering.root + inside


def _send(state: _State, gathering: Gathering) -> None:
    """A block's gradients are combined: a buffer takes them until the next block's are sent, a part stays."""
    whole = state.unit_gradients
    if whole <= 0:
        return
    state.now.gradients -= whole * (1 - 1 / gathering.ranks)
    state.now.buckets = whole
    state.unit_gradients = 0.0


def _step(change: Change, batch: int, rounding: Rounding) -> tuple[float, float]:
    size = change.bytes.at(batch)
    extra = rounding(size) if size > 0 else -rounding(-size)
    return size * change.times, extra * change.times
