"""Turns errors of Gloo, NCCL and the store into one line that names the ranks which are missing or late."""

import os
import re
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import CollectiveError
from meshwright.launch.failure import NO_ANSWER
from meshwright.launch.heartbeat import Heartbeat, HeartbeatRecord, describe_progress, heartbeat_file, read_heartbeat
from meshwright.launch.world import World

_TIMEOUT_MESSAGE = re.compile(r"timed? ?out", re.IGNORECASE)
_COMMUNICATION_MESSAGE = re.compile(
    r"gloo|nccl|ProcessGroup|connectFullMesh|TCPStore|c10d|timeout caused pair closure"
    r"|Connection (closed by peer|reset|refused)|Broken pipe|Socket closed|Timed out waiting",
    re.IGNORECASE,
)
_MOST_NAMED = 3


def explain_communication_error(
    error: BaseException, world: World, heartbeat: Heartbeat, timeout_s: float, folder: Path | None
) -> CollectiveError | None:
    """Returns an error that says which operation failed and which ranks are missing or late; None if the error has
    nothing to do with communication."""
    if isinstance(error, CollectiveError):
        return error
    root = communication_error(error)
    if root is None:
        return None
    step = f"step {heartbeat.step}, " if heartbeat.step >= 0 else ""
    timed_out = isinstance(root, TimeoutError) or bool(_TIMEOUT_MESSAGE.search(str(root)))
    problem = f"{NO_ANSWER} {timeout_s:g} s" if timed_out else "the connection broke"
    return CollectiveError(
        f"rank {world.rank}, {step}{_operation(error, heartbeat.activity)} ({heartbeat.activity}): {problem}"
        f"{_others(world, heartbeat, folder)}"
    )


def communication_error(error: BaseException) -> BaseException | None:
    """Returns the first communication error among this error and its causes; None if there is none. Errors of other
    types are never communication errors, even if their message mentions Gloo or NCCL."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistError):
            return current
        is_builtin = type(current) in (RuntimeError, ConnectionError, TimeoutError)
        if is_builtin and _COMMUNICATION_MESSAGE.search(str(current)):
            return current
        current = current.__cause__
    return None


def _operation(error: BaseException, activity: str) -> str:
    """Returns the name of the collective that failed, from the innermost frame in torch.distributed. Calls from
    autograd have no such frame; their name is derived from `activity`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).name
        if file == "distributed_c10d.py" and frame.name != "wrapper" and not frame.name.startswith("_"):
            name = "joining" if frame.name == "init_process_group" else frame.name
            return name.replace("_", "-")
    return "gradient all-reduce" if "backward" in activity else "communication"


def _others(world: World, heartbeat: Heartbeat, folder: Path | None) -> str:
    """Returns the end of the message: which ranks are gone; if none is, which have not started; if all have, which are
    at another step. Empty if this machine does not have the heartbeats of all ranks."""
    if folder is None or world.size == 1 or world.local_size < world.size:
        return ""
    gone: list[str] = []
    elsewhere: list[tuple[int, str]] = []
    not_started: list[str] = []
    for rank in (rank for rank in range(world.size) if rank != world.rank):
        peer = read_heartbeat(heartbeat_file(folder, rank))
        if peer is None or peer.attempt != world.attempt:
            not_started.append(f"rank {rank} was not seen yet")
        elif not _is_alive(peer):
            gone.append(f"rank {rank} is gone, last seen{_where(peer)}")
        elif (peer.step, peer.activity) != (heartbeat.step, heartbeat.activity):
            elsewhere.append((peer.step, f"rank {rank} was last seen{_where(peer)}"))
    reports = gone or not_started or [text for _, text in sorted(elsewhere)]
    if not reports:
        return "; the other ranks were last seen at the same place"
    more = f" (and {len(reports) - _MOST_NAMED} more)" if len(reports) > _MOST_NAMED else ""
    return f"; {', '.join(reports[:_MOST_NAMED])}{more}"


def _where(peer: HeartbeatRecord) -> str:
    return f" at step {peer.step} in {peer.activity}" if peer.step >= 0 else describe_progress(peer.step, peer.activity)


def _is_alive(peer: HeartbeatRecord) -> bool:
    """Whether the process of a rank on this machine is running."""
    try:
        os.kill(peer.pid, 0)
        if sys.platform != "linux":  # there is no /proc, which tells zombies
            return True
        state = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except PermissionError:
        return True
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")
