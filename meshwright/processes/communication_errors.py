"""Turns errors of Gloo, NCCL and the store into one line that names the ranks which are missing or late."""

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import CollectiveError
from meshwright.processes.failure import NO_ANSWER
from meshwright.processes.heartbeat import Heartbeat, HeartbeatRecord, describe_progress, heartbeat_file, read_heartbeat
from meshwright.processes.stall.collection import Finding
from meshwright.processes.stall.process_state import is_alive
from meshwright.processes.stall.watchdog import Watchdog
from meshwright.processes.world import World

_TIMEOUT_MESSAGE = re.compile(r"timed? ?out", re.IGNORECASE)
# What our own collectives say if a rank is late, and what they and Gloo say if ranks do not exchange the same.
_LATE_MESSAGE = re.compile(
    rf"did not come within|does not answer|gave up waiting|timed? ?out|{NO_ANSWER}", re.IGNORECASE
)
_MISMATCH_MESSAGE = re.compile(r"\bbrought \d+ elements")
_GLOO_MISMATCH_MESSAGE = re.compile(r"enforce fail|preamble", re.IGNORECASE)
_BROKEN_MESSAGE = re.compile(r"Connection (closed by peer|reset)|Broken pipe|Socket closed", re.IGNORECASE)
_COMMUNICATION_MESSAGE = re.compile(
    r"gloo|nccl|ProcessGroup|connectFullMesh|TCPStore|c10d|timeout caused pair closure"
    r"|Connection (closed by peer|reset|refused)|Broken pipe|Socket closed|Timed out waiting",
    re.IGNORECASE,
)
_MOST_NAMED = 3


def explain_communication_error(
    error: BaseException,
    world: World,
    heartbeat: Heartbeat,
    timeout_s: float,
    folder: Path | None,
    watchdog: Watchdog | None = None,
) -> CollectiveError | None:
    """Returns an error that says which operation failed and which ranks are missing or late; None if the error has
    nothing to do with communication. With a watchdog, it asks all ranks what they are doing if one of them is late or
    exchanges something else, and writes a report."""
    root = error if isinstance(error, CollectiveError) else communication_error(error)
    if root is None or getattr(root, "report", None) is not None:
        return root if isinstance(root, CollectiveError) else None
    if watchdog is not None:
        explained = _explain_by_watchdog(error, root, timeout_s, watchdog, lambda: bool(_gone_ranks(world, folder)))
        if explained is not None:
            return explained
    if isinstance(error, CollectiveError):
        return error
    step = f"step {heartbeat.step}, " if heartbeat.step >= 0 else ""
    timed_out = isinstance(root, TimeoutError) or bool(_TIMEOUT_MESSAGE.search(str(root)))
    problem = f"{NO_ANSWER} {timeout_s:g} s" if timed_out else "the connection broke"
    return CollectiveError(
        f"rank {world.rank}, {step}{_operation(error, heartbeat.activity)} ({heartbeat.activity}): {problem}"
        f"{_others(world, heartbeat, folder)}"
    )


def _explain_by_watchdog(
    error: BaseException, root: BaseException, timeout_s: float, watchdog: Watchdog, is_gone: Callable[[], bool]
) -> CollectiveError | None:
    """Returns an error with the first line of a report; None if the error is another one than a timeout or a
    mismatch, or if a rank that could not answer is gone, unless another rank has written a report or writes one now:
    a rank that gives up waiting closes its connections, and its peers fail before it has asked them."""
    finding = watchdog.recent_finding()
    if finding is not None:
        return _error_of(finding)
    message = str(root)
    is_ours = isinstance(root, CollectiveError)
    given = message if is_ours and _MISMATCH_MESSAGE.search(message) else None
    is_late = isinstance(root, TimeoutError) or bool(_LATE_MESSAGE.search(message))
    if is_gone():
        return None
    if is_late or given or (not is_ours and _GLOO_MISMATCH_MESSAGE.search(message)):
        finding = watchdog.find_cause(error, f"{NO_ANSWER} {timeout_s:g} s" if is_late else "", given)
    elif _BROKEN_MESSAGE.search(message):
        finding = watchdog.await_finding(error, is_gone)
    return None if finding is None else _error_of(finding)


def _error_of(finding: Finding) -> CollectiveError:
    error = CollectiveError(finding.line)
    error.report = str(finding.report) if finding.report else None
    return error


def _gone_ranks(world: World, folder: Path | None) -> list[int]:
    """Returns the ranks on this machine whose process is gone, by their heartbeats. They cannot answer."""
    if folder is None or world.local_size < world.size:
        return []
    peers = {rank: read_heartbeat(heartbeat_file(folder, rank)) for rank in range(world.size)}
    return [rank for rank, peer in peers.items() if peer and peer.attempt == world.attempt and not is_alive(peer.pid)]


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
        elif not is_alive(peer.pid):
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
