"""Which stage and microbatch each rank of a pipeline computes, in the order in which PyTorch's schedules run them.

    stage s is on rank s mod p; zbv folds the chain: stages r and 2p - 1 - r are on rank r             stages_of_rank
    gpipe              all forwards, then all backwards
    1f1b               p - 1 - r forwards, then forward and backward in turns, then the other backwards
    interleaved_1f1b   the same over v stages, n microbatches of a stage at a time, (v - 1)n + 2(p - 1 - r) ahead
    zero_bubble        the same with (v - 1)n + (p - 1 - r) ahead; weight gradients follow r input gradients behind
    zbv                two stages a rank, down the ranks and up again; see the table in _zbv
    (p ranks, r one of them, v stages a rank, m microbatches in max(1, m // p) rounds of n)              pipeline_order

The order is one list for each rank: timeline.py prices it, and tests compare it with what
torch.distributed.pipelining runs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple

from meshwright.errors import InputError, did_you_mean

PassKind = Literal["forward", "backward", "input_backward", "weight_backward"]


class Action(NamedTuple):
    """One pass of one microbatch on one stage. A `backward` action computes all gradients. Zero-bubble schedules
    replace it by an `input_backward` for the gradient of the stage's input and a `weight_backward` for those of its
    weights."""

    stage: int
    microbatch: int
    kind: PassKind


Order = tuple[tuple[Action, ...], ...]
_Pass = tuple[int, PassKind]


# Predictions of the time and the memory of a plan, and of similar plans, need the same orders.
@lru_cache(maxsize=64)
def pipeline_order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """The actions of each rank, in the order in which it runs them."""
    check_schedule(schedule, ranks, stages_per_rank, microbatches)
    build = _BUILDERS[schedule]
    return tuple(tuple(build(rank, ranks, stages_per_rank, microbatches)) for rank in range(ranks))


def stages_of_rank(schedule: str, ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """The numbers of a rank's stages, in the order in which the forward pass of a microbatch runs them."""
    _check_stages(schedule, ranks, stages_per_rank)
    if schedule == "zbv":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * stages_per_rank, ranks))


def check_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Raises `InputError` with a suggestion if PyTorch refuses to run the schedule with these numbers."""
    _check_stages(schedule, ranks, stages_per_rank)
    if schedule == "1f1b" and microbatches < ranks:
        raise InputError(
            f"1f1b needs as many microbatches as ranks, but there are {microbatches} for {ranks}: choose"
            f" microbatches >= {ranks}, or gpipe"
        )
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved_1f1b", "zero_bubble") and microbatches % rounds:
        below = microbatches - microbatches % ranks
        raise InputError(
            f"{schedule} on {ranks} ranks runs {microbatches} microbatches in {rounds} rounds, which do not divide"
            f" them: choose microbatches {below} or {below + ranks}"
        )


def _check_stages(schedule: str, ranks: int, stages_per_rank: int) -> None:
    if schedule not in _BUILDERS:
        raise InputError(f"unknown pipeline schedule '{schedule}'{did_you_mean(schedule, _BUILDERS)}")
    needed = _STAGES.get(schedule, stages_per_rank)
    if stages_per_rank != needed:
        raise InputError(
            f"{schedule} runs {needed} {'stage' if needed == 1 else 'stages'} a rank, not {stages_per_rank}: choose"
            f" cuts that make {ranks * needed} stages, or interleaved_1f1b or zero_bubble"
        )


def _gpipe(rank: int, ranks: int, _: int, microbatches: int) -> Iterator[Action]:
    yield from (Action(rank, microbatch, "forward") for microbatch in range(microbatches))
    yield from (Action(rank, microbatch, "backward") for microbatch in range(microbatches))


def _1f1b(rank: int, ranks: int, _: int, microbatches: int) -> Iterator[Action]:
    forwards = [Action(rank, microbatch, "forward") for microbatch in range(microbatches)]
    backwards = [Action(rank, microbatch, "backward") for microbatch in range(microbatches)]
    return _in_turns(forwards, backwards, ahead=ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Iterator[Action]:
    ahead = (stages_per_rank - 1) * _round_size(ranks, microbatches) + 2 * (ranks - 1 - rank)
    return _in_turns(*_rounds(rank, ranks, stages_per_rank, microbatches, "backward"), ahead)


def _zero_bubble(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Iterator[Action]:
    ahead = (stages_per_rank - 1) * _round_size(ranks, microbatches) + (ranks - 1 - rank)
    actions = _in_turns(*_rounds(rank, ranks, stages_per_rank, microbatches, "input_backward"), ahead)
    return _with_weights(actions, behind=rank)


def _zbv(rank: int, ranks: int, _: int, microbatches: int) -> Iterator[Action]:
    """The actions of a rank under the zbv schedule. The table is made for at least 2p - 1 microbatches; if there are
    fewer, the actions of the missing microbatches are left out. Each entry says how often its list of passes is run."""
    down, up = stages_of_rank("zbv", ranks, 2, rank)
    filled = max(2 * ranks - 1, microbatches)
    forward_down, input_down, weight_down = _passes(down)
    forward_up, input_up, weight_up = _passes(up)
    table = [
        (2 * (ranks - rank) - 1, [forward_down]),
        (rank, [forward_up, forward_down]),
        (ranks - rank, [forward_up, input_up, weight_up]),
        (filled - 2 * ranks + rank + 1, [forward_down, input_down, weight_down, forward_up, input_up, weight_up]),
        (ranks - rank - 1, [input_down, weight_down, forward_up, input_up, weight_up]),
        (rank, [input_down, input_up]),
        (ranks - rank, [input_down, weight_down]),
        (rank, [weight_up]),
        (rank, [weight_down]),
    ]
    following: defaultdict[_Pass, Iterator[int]] = defaultdict(count)
    for times, passes in table:
        for _ in range(times):
            for stage, kind in passes:
                microbatch = next(following[stage, kind])
                if microbatch < microbatches:
                    yield Action(stage, microbatch, kind)


def _passes(stage: int) -> tuple[_Pass, _Pass, _Pass]:
    return (stage, "forward"), (stage, "input_backward"), (stage, "weight_backward")


def _round_size(ranks: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // ranks)


def _rounds(
    rank: int, ranks: int, stages_per_rank: int, microbatches: int, kind: PassKind
) -> tuple[list[Action], list[Action]]:
    """All forward actions and all backward actions of a rank, each in its order. All microbatches of a round run on one
    of the rank's stages before they run on the next."""
    stages = stages_of_rank("interleaved_1f1b", ranks, stages_per_rank, rank)
    size = _round_size(ranks, microbatches)
    begins = range(0, microbatches, size)
    forwards = [Action(s, b + i, "forward") for b in begins for s in stages for i in range(size)]
    backwards = [Action(s, b + i, kind) for b in begins for s in reversed(stages) for i in range(size)]
    return forwards, backwards


def _in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _with_weights(actions: Iterable[Action], behind: int) -> Iterator[Action]:
    """The actions with a `weight_backward` inserted for each `input_backward`. It runs after the `input_backward` that
    is `behind` places later in the order of `input_backward` actions, or at the end."""
    pending: deque[Action] = deque()
    for action in actions:
        yield action
        if action.kind == "input_backward":
            pending.append(Action(action.stage, action.microbatch, "weight_backward"))
            if len(pending) > behind:
                yield pending.popleft()
    yield from pending


_STAGES = {"gpipe": 1, "1f1b": 1, "zbv": 2}
_BUILDERS: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved,
    "zero_bubble": _zero_bubble,
    "zbv": _zbv,
}
