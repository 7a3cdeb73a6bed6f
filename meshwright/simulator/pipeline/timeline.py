"""Computes when each rank of a pipeline runs each of its actions: the timeline of an order of actions.

    start = max(end of the rank's action before, end of the action that it needs + transfer)                 timeline
    needs: forward of stage s: forward of s - 1;  backward of s: backward of s + 1, of the last stage its own forward
    span  = the last end = busy + idle, on every rank                                                      Timeline

Each microbatch passes a chain of 2 × stages positions, first the forward passes in the order of stages, then the
backward passes in reverse order. An action waits for the action at the position before its own. A rank runs actions
until it needs a result that is missing, and is resumed when the result exists, so that every action is visited at most
twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from meshwright.simulator.pipeline.order import Action, Order, PassKind
from meshwright.simulator.profile_cache import ProfileCache

_NOT_ENDED = -1.0
_NOTHING_WAITS = -1


class Event(NamedTuple):
    """One action of a rank, with its start and end."""

    rank: int
    stage: int
    microbatch: int
    kind: PassKind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """An order of actions, the start and end of each action (one tuple per rank, in that order), and the seconds that
    each rank is busy. On every rank `busy_s` and `idle_s` add up to `span_s`, the end of the last action of all
    ranks."""

    order: Order
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]

    @property
    def span_s(self) -> float:
        return max(ends[-1] for ends in self.ends_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        span_s = self.span_s
        return tuple(span_s - busy_s for busy_s in self.busy_s)

    def events(self) -> Iterator[Event]:
        """Yields all actions with their times, rank by rank, and for each rank in the order of time."""
        for rank, times in enumerate(zip(self.order, self.starts_s, self.ends_s, strict=True)):
            for action, start_s, end_s in zip(*times, strict=True):
                yield Event(rank, *action, start_s, end_s)


def timeline(order: Order, costs: Callable[[Action], float], transfer: Callable[[int, int], float]) -> Timeline:
    """The timeline of an order. `costs` returns the seconds of an action, equal for all microbatches: it is
    called for one action of each stage and kind. `transfer` returns the seconds of a message from one stage to a
    neighbouring one; it is called only if the two are on different ranks. Raises ValueError if the order deadlocks."""
    waits = _WAITS.get(order, (), lambda: _order_waits(order))
    rank_of = waits.rank_of
    action_s = [costs(action) for action in waits.actions]
    delay_s = [
        transfer(source, action.stage) if rank_of.get(source, rank_of[action.stage]) != rank_of[action.stage] else 0.0
        for action, source in zip(waits.actions, waits.sources, strict=True)
    ]
    ended = [0.0] * waits.microbatches + [_NOT_ENDED] * (2 * len(rank_of) * waits.microbatches)
    starts: list[list[float]] = [[] for _ in order]
    ends: list[list[float]] = [[] for _ in order]
    busy_s = [0.0] * len(order)
    waiting: dict[int, int] = {}
    runnable = list(range(len(order)))
    while runnable:
        rank = runnable.pop()
        started, done, busy = starts[rank], ends[rank], busy_s[rank]
        now = done[-1] if done else 0.0
        for kind, needs, ends_at in islice(waits.ranks[rank], len(done), None):
            needed = ended[needs]
            if needed == _NOT_ENDED:
                waiting[needs] = rank
                break
            if needed + delay_s[kind] > now:
                now = needed + delay_s[kind]
            started.append(now)
            cost = action_s[kind]
            now, busy = now + cost, busy + cost
            done.append(now)
            if ends_at != _NOTHING_WAITS:
                ended[ends_at] = now
                if ends_at in waiting:
                    runnable.append(waiting.pop(ends_at))
        busy_s[rank] = busy
    _check_finished(order, ends)
    return Timeline(order, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(busy_s))


@dataclass(frozen=True)
class _OrderWaits:
    """What the actions of an order wait for, whatever they cost.

    actions   one action of each stage and kind; `sources` has the stage that each waits for
    ranks     for each action of a rank: the index of its stage and kind in `actions`; in the list of ends, the index of
              the end that it waits for, and the index at which its own end is stored, or `_NOTHING_WAITS`
    rank_of   the rank of each stage
    """

    actions: tuple[Action, ...]
    sources: tuple[int, ...]
    ranks: tuple[tuple[tuple[int, int, int], ...], ...]
    rank_of: dict[int, int]
    microbatches: int


# The planner computes the timelines of a few orders with many costs.
_WAITS: ProfileCache[_OrderWaits] = ProfileCache(64)


def _order_waits(order: Order) -> _OrderWaits:
    """Position 0 of the chain of positions is the pipeline's input. Nothing waits for a `weight_backward`."""
    microbatches = 1 + max(action.microbatch for actions in order for action in actions)
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    kinds: dict[tuple[int, PassKind], tuple[int, int, int]] = {}
    actions: list[Action] = []
    sources: list[int] = []
    ranks = []
    for rank_actions in order:
        waits = []
        for action in rank_actions:
            stage, microbatch, kind = action
            if (stage, kind) not in kinds:
                needs, ends_at, source = _positions(stage, kind, len(rank_of))
                kinds[stage, kind] = len(actions), needs * microbatches, ends_at * microbatches
                actions.append(action)
                sources.append(source)
            number, needs, ends_at = kinds[stage, kind]
            waits.append((number, needs + microbatch, ends_at + microbatch if ends_at >= 0 else _NOTHING_WAITS))
        ranks.append(tuple(waits))
    return _OrderWaits(tuple(actions), tuple(sources), tuple(ranks), rank_of, microbatches)


def _positions(stage: int, kind: PassKind, stages: int) -> tuple[int, int, int]:
    """The position that an action waits for, its own position (negative if nothing waits for it), and the stage at the
    position that it waits for."""
    up, down = stage + 1, 2 * stages - stage
    if kind == "forward":
        return up - 1, up, stage - 1
    if kind == "weight_backward":
        return down, _NOTHING_WAITS, stage
    return down - 1, down, stage + 1


def _check_finished(order: Order, ends: list[list[float]]) -> None:
    for rank, (actions, done) in enumerate(zip(order, ends, strict=True)):
        if len(done) < len(actions):
            stage, microbatch, kind = actions[len(done)]
            raise ValueError(
                f"the order cannot run: rank {rank} waits forever to run {kind} of stage {stage}, microbatch"
                f" {microbatch}, action {len(done) + 1} of its {len(actions)}"
            )
