"""What a user may be told: every exception here prints as one clear line, never as a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class MeshwrightError(Exception):
    """Something a user can understand and act upon. `exit_code` is what the command line returns for it."""

    exit_code = 1


class InputError(MeshwrightError):
    """The job, plan, cluster, data or command line is wrong: names, values, and what to do."""

    exit_code = 2


class RankError(MeshwrightError):
    """A rank failed: which one, where it was, and its own words."""


class CollectiveError(MeshwrightError):
    """Ranks stopped answering each other: which rank, at which step, in which operation."""


class CheckpointError(MeshwrightError):
    """A checkpoint is missing, damaged, or holds something else than the model needs."""


class Stopped(MeshwrightError):
    """The run was asked to stop before its end, and says where it can be taken up again."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'epochs'?`, or the list of what is known when nothing is near."""
    options = sorted(known)
    near = get_close_matches(name, options, n=1, cutoff=0.6)
    if near:
        return f": did you mean '{near[0]}'?"
    if 0 < len(options) <= 20:
        return f": known are {', '.join(options)}"
    return ""
