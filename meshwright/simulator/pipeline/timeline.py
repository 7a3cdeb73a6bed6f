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
from typing import NamedTuple

from meshwright.simulator.pipeline.order import Action, Order, PassKind

_NOT_ENDED = -1.0


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
    """The timeline of an order. `costs` returns the seconds of an action. `transfer` returns the seconds of a message
    from one stage to a neighbouring one; it is called only if the two are on different ranks. Raises ValueError if the
    order deadlocks."""
    microbatches = 1 + max(action.microbatch for actions in order for action in actions)
    dependencies = _dependencies(order, transfer, microbatches)
    ended = [0.0] * microbatches + [_NOT_ENDED] * (2 * len(dependencies["forward"]) * microbatches)
    starts: list[list[float]] = [[] for _ in order]
    ends: list[list[float]] = [[] for _ in order]
    busy_s = [0.0] * len(order)
    waiting: dict[int, int] = {}
    runnable = list(range(len(order)))
    while runnable:
        rank = runnable.pop()
        actions, started, done, busy = order[rank], starts[rank], ends[rank], busy_s[rank]
        now = done[-1] if done else 0.0
        while len(done) < len(actions):
            action = actions[len(done)]
            stage, microbatch, kind = action
            needs, ends_at, delay_s = dependencies[kind][stage]
            needed = ended[needs + microbatch]
            if needed == _NOT_ENDED:
                waiting[needs + microbatch] = rank
                break
            if needed + delay_s > now:
                now = needed + delay_s
            started.append(now)
            cost = costs(action)
            now, busy = now + cost, busy + cost
            done.append(now)
            if ends_at is not None:
                ended[ends_at + microbatch] = now
                if ends_at + microbatch in waiting:
                    runnable.append(waiting.pop(ends_at + microbatch))
        busy_s[rank] = busy
    _check_finished(order, ends)
    return Timeline(order, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(busy_s))


class _Dependency(NamedTuple):
    """What the actions of one kind and stage wait for. In the list of ends, `needs` is the index of the end of the
    action that is waited for, and `ends_at` the index at which the action's own end is stored (None if nothing waits
    for it). Both are those of microbatch 0; the microbatches follow each other. `delay_s` is the transfer between the
    two."""

    needs: int
    ends_at: int | None
    delay_s: float


def _dependencies(
    order: Order, transfer: Callable[[int, int], float], microbatches: int
) -> dict[PassKind, dict[int, _Dependency]]:
    """The dependencies by kind of action and stage. Position 0 of the chain is the pipeline's input. No action waits
    for a `weight_backward`."""
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}

    def delay(source: int, stage: int) -> float:
        return transfer(source, stage) if rank_of.get(source, rank_of[stage]) != rank_of[stage] else 0.0

    forward, backward, weights = {}, {}, {}
    for stage in rank_of:
        up, down = (stage + 1) * microbatches, (2 * len(rank_of) - stage) * microbatches
        forward[stage] = _Dependency(up - microbatches, up, delay(stage - 1, stage))
        backward[stage] = _Dependency(down - microbatches, down, delay(stage + 1, stage))
        weights[stage] = _Dependency(down, None, 0.0)
    return {"forward": forward, "backward": backward, "input_backward": backward, "weight_backward": weights}


def _check_finished(order: Order, ends: list[list[float]]) -> None:
    for rank, (actions, done) in enumerate(zip(order, ends, strict=True)):
        if len(done) < len(actions):
            stage, microbatch, kind = actions[len(done)]
            raise ValueError(
                f"the order cannot run: rank {rank} waits forever to run {kind} of stage {stage}, microbatch"
                f" {microbatch}, action {len(done) + 1} of its {len(actions)}"
            )
