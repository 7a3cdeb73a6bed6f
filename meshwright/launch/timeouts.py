"""Who kept a collective waiting: turns Gloo's, NCCL's and the store's errors into one line with names."""

import os
import re
import traceback
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import CollectiveError
from meshwright.launch.failure import NO_ANSWER
from meshwright.launch.place import Place, Seen, describe, place_file, read_place
from meshwright.launch.world import World

_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_COMMUNICATION = re.compile(
    r"gloo|nccl|ProcessGroup|connectFullMesh|TCPStore|c10d|timeout caused pair closure"
    r"|Connection (closed by peer|reset|refused)|Broken pipe|Socket closed|Timed out waiting",
    re.IGNORECASE,
)
_MOST_NAMED = 3


def explain(
    error: BaseException, world: World, place: Place, timeout_s: float, folder: Path | None
) -> CollectiveError | None:
    """None where the error is not one of communication."""
    if isinstance(error, CollectiveError):
        return error
    root = _communication_error(error)
    if root is None:
        return None
    step = f"step {place.step}, " if place.step >= 0 else ""
    late = isinstance(root, TimeoutError) or bool(_LATE.search(str(root)))
    what = f"{NO_ANSWER} {timeout_s:g} s" if late else "the connection broke"
    return CollectiveError(
        f"rank {world.rank}, {step}{_operation(error, place.doing)} ({place.doing}): {what}"
        f"{_others(world, place, folder)}"
    )


def _communication_error(error: BaseException) -> BaseException | None:
    """The error itself or the one it was raised from. A user's own exceptions that merely mention Gloo or
    NCCL are of other types, or do not come out of torch."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistError):
            return current
        plain = type(current) in (RuntimeError, ConnectionError, TimeoutError)
        if plain and _COMMUNICATION.search(str(current)):
            return current
        current = current.__cause__
    return None


def _operation(error: BaseException, doing: str) -> str:
    """The collective's name, from the innermost frame in torch.distributed; autograd's calls have none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).name
        if file == "distributed_c10d.py" and frame.name != "wrapper" and not frame.name.startswith("_"):
            name = "joining" if frame.name == "init_process_group" else frame.name
            return name.replace("_", "-")
    return "gradient all-reduce" if "backward" in doing else "communication"


def _others(world: World, place: Place, folder: Path | None) -> str:
    """Who is gone, or else who is behind, as far as their places can be read on this machine."""
    if folder is None or world.size == 1 or world.local_size < world.size:
        return ""
    gone: list[str] = []
    apart: list[tuple[int, str]] = []
    unseen: list[str] = []
    for rank in (rank for rank in range(world.size) if rank != world.rank):
        seen = read_place(place_file(folder, rank))
        if seen is None or seen.attempt != world.attempt:
            unseen.append(f"rank {rank} was not seen yet")
        elif not _is_alive(seen):
            gone.append(f"rank {rank} is gone, last seen{_where(seen)}")
        elif (seen.step, seen.doing) != (place.step, place.doing):
            apart.append((seen.step, f"rank {rank} was last seen{_where(seen)}"))
    named = gone or unseen or [text for _, text in sorted(apart)]
    if not named:
        return "; the other ranks were last seen at the same place"
    more = f" (and {len(named) - _MOST_NAMED} more)" if len(named) > _MOST_NAMED else ""
    return f"; {', '.join(named[:_MOST_NAMED])}{more}"


def _where(seen: Seen) -> str:
    return f" at step {seen.step} in {seen.doing}" if seen.step >= 0 else describe(seen.step, seen.doing)


def _is_alive(seen: Seen) -> bool:
    try:
        os.kill(seen.pid, 0)
        state = Path(f"/proc/{seen.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except PermissionError:
        return True
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")
