"""The exceptions that users may see. The command line prints each of them as one clear line, without a traceback."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches


class MeshwrightError(Exception):
    """The base class of all errors that a user can understand and act upon. `exit_code` is the command line's exit
    status for it."""

    exit_code = 1


def chain_of(error: BaseException | None, end: BaseException | None = None) -> Iterator[BaseException]:
    """Yields an exception and those that it was raised from or while handling, the last one first, without `end` and
    those before it. Each is yielded once: an exception may be among those that it was raised from."""
    seen: list[BaseException] = []
    while error is not None and error is not end and not any(error is other for other in seen):
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


class InputError(MeshwrightError):
    """The job, plan, cluster, data or command line is wrong. The message says which field, its value and what to do."""

    exit_code = 2


class UnequalPlan(InputError):
    """A plan was checked before training, and does not train the same model as one device. The message says what
    differs first, why, and which plan trains the same model."""

    exit_code = 3


class MixedSamples(UnequalPlan):
    """A plan divides batches, and the model mixes their samples: what it returns for one depends on the others."""


class ModelConstructorError(InputError):
    """The constructor of a library's model failed with the arguments of the job, on this device. The message says which
    constructor, and with which error it failed."""


class NotPredictable(InputError):
    """A model can neither be traced nor measured, so nothing can be said about its time and memory."""


class UserCodeError(MeshwrightError):
    """The user's own code failed: an imported file, a model, a data set or a loss, for example. The message says what
    was being done, with which error it failed, and in which file and line."""


class RankError(MeshwrightError):
    """A rank failed. The message says which rank, what it was doing, and with which error it failed."""


class OutOfMemory(RankError):
    """A rank ran out of memory. The message says where, how much it wanted and what was in memory by kind."""


class CollectiveError(MeshwrightError):
    """Ranks lost contact with each other. The message says which rank, at which step and in which operation. `report`
    is the path of a file with the stacks of all ranks, if they could be collected."""

    report: str | None = None


class CheckpointError(MeshwrightError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class StorageError(MeshwrightError):
    """The disk or folder cannot take what has to be written. The message says which disk, and how many bytes are
    missing."""


class RemoteStorageError(StorageError):
    """A store that a URL names does not answer, or refuses. The message says which URL, what was tried, and the reason
    of the store."""


class TrainingDiverged(MeshwrightError):
    """The loss or the gradients stayed NaN or infinite, so the run ended. The message says since which step, and what
    to do."""


class Stopped(MeshwrightError):
    """The run was stopped before its end by a signal. The message says how to resume it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name. If a known name is similar, it is `: did you mean
    'epochs'?`; otherwise it lists the known names, or is empty if there are none or more than 20."""
    options = sorted(known)
    only_case_differs = [option for option in options if option.lower() == name.lower()]
    near = only_case_differs or get_close_matches(name, options, n=1, cutoff=0.6)
    if near:
        return f": did you mean '{near[0]}'?"
    if 0 < len(options) <= 20:
        return f": known are {', '.join(options)}"
    return ""
