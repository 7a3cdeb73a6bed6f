"""`Departure`: that a rank has left the loop of a session, as it tells the other ranks through their store. A rank that
waits for one that has left can then say so; otherwise it would only see a broken connection, or none for a long time.

    left/RANK        how many steps the rank has made, and the error that has ended it, if there was one
    waits/RANK       the line about a rank that has left and that this one waits for, which ends both with a failure
    done/RANK        the rank has read what the others have written, and its store may end
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.errors import CollectiveError
from meshwright.processes.token.signed_store import read, write

_WRITTEN_S = 2.0  # how long a rank whose connections are closed may take to say that it has left
_POLL_S = 0.05


@dataclass(frozen=True)
class Departure:
    """`rank` has made `steps` steps and left. `error` is the exception that has ended it, in words; None if it has
    reached the end of its loop."""

    rank: int
    steps: int
    error: str | None = None


def tell_departure(store: dist.Store, departure: Departure) -> None:
    """Tells the other ranks that this one has left. Does nothing if their store is gone."""
    with suppress(RuntimeError, OSError, ValueError):
        write(store, f"left/{departure.rank}", json.dumps([departure.steps, departure.error]))


def find_departure(store: dist.Store, rank: int, size: int, *, waits: bool) -> Departure | None:
    """Returns that another rank has left; None if none has. With `waits`, it waits for a moment until one says so."""
    deadline = time.monotonic() + (_WRITTEN_S if waits else 0.0)
    with suppress(RuntimeError, OSError, ValueError):
        while True:
            others = [other for other in range(size) if other != rank and store.check([f"left/{other}"])]
            if others:
                left = [Departure(other, *json.loads(read(store, f"left/{other}"))) for other in others]
                # A rank that has ended because of another one that has left says so, but is not the cause.
                return min(left, key=lambda departure: (departure.error or "").startswith(CollectiveError.__name__))
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
    return None


def tell_wait(store: dist.Store, rank: int, line: str) -> None:
    """Tells a rank that has left that this one waits for it. Does nothing if their store is gone."""
    with suppress(RuntimeError, OSError, ValueError):
        write(store, f"waits/{rank}", line)


def await_others(store: dist.Store, rank: int, size: int, limit_s: float) -> str | None:
    """Waits until all other ranks have left, too, and at most `limit_s`. Returns the line of a rank that waits for this
    one; None if none does."""
    others = [other for other in range(size) if other != rank]
    line = None
    with suppress(RuntimeError, OSError, ValueError):  # the store is gone: the others have ended
        deadline = time.monotonic() + limit_s
        while line is None and time.monotonic() < deadline:
            has_left = store.check([f"left/{other}" for other in others])
            line = next(
                (read(store, f"waits/{other}").decode() for other in others if store.check([f"waits/{other}"])), None
            )
            if has_left:
                break
            time.sleep(_POLL_S)
        write(store, f"done/{rank}", "")
        # The store is often in the process of rank 0.
        deadline = time.monotonic() + (_WRITTEN_S if rank == 0 and line is None else 0.0)
        while time.monotonic() < deadline and not store.check([f"done/{other}" for other in others]):
            time.sleep(_POLL_S)
    return line


def describe_departure(left: Departure, rank: int, steps: int, activity: str, *, is_in_step: bool) -> str:
    """Returns the line about a rank that has left, for a rank that waits for it. `steps` is the number of steps that
    the waiting rank has made, and `is_in_step` whether it is in the next one."""
    waits = f"rank {rank} waits for it" + (f" in step {steps + 1} ({activity})" if is_in_step else "")
    if left.error is not None:
        return f"rank {left.rank} has ended after {_count(left.steps)} with {left.error}; {waits}"
    if left.steps == steps and not is_in_step:
        return (
            f"rank {left.rank} has left its loop after {_count(left.steps)}, and {waits} in a call that all ranks must"
            " make: call the session's methods on all ranks, also save, load, state_dict and evaluate"
        )
    return (
        f"rank {left.rank} has left its loop after {_count(left.steps)}, and {waits}: all ranks must make the same"
        " number of steps. Give them equally many batches, which session.prepare(loader) and session.batches(dataset)"
        " do if all ranks read the same samples, and leave the loop on all ranks after the same step"
    )


def _count(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"
