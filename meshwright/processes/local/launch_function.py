"""`mw.launch`: calls a function in several ranks of this machine, from a notebook cell or a script."""

import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from meshwright.errors import InputError, MeshwrightError
from meshwright.processes import environment

Value = TypeVar("Value")


def launch(
    function: Callable[..., Value],
    /,
    *args: Any,
    ranks: int = 2,
    device: Literal["cuda", "cpu"] | None = None,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> Value:
    """Calls `function(*args, **kwargs)` in `ranks` new processes on this machine, as torchrun would start them, and
    returns what it returns in rank 0.

    In the function, `mw.parallelize`, `mw.best_plan` and `torch.distributed.init_process_group` join the ranks. What
    the ranks print appears where this process prints; lines of ranks other than 0 begin with `[rank 1]`. The function,
    its arguments and the variables that it uses are copied to the ranks, so the script or notebook is not executed
    there again, and changes that the function makes to variables stay in the ranks.

    `device` is `cuda` (rank 0 gets the first GPU, rank 1 the second, and so on) or `cpu`; None means `cuda` if this
    machine has a GPU. After `timeout_s` seconds ranks that still run are ended; None means no limit. Arguments of the
    function that are called `ranks`, `device` or `timeout_s` can be given with `functools.partial`.

    Raises RankError, with the rank's traceback, if the function raises an exception in a rank, if a rank dies, or after
    `timeout_s`; the other ranks are then ended. An interrupt ends all ranks.

    >>> import meshwright as mw
    >>> def rank_and_size():
    ...     import os
    ...
    ...     return os.environ["RANK"], os.environ["WORLD_SIZE"]
    >>> mw.launch(rank_and_size, ranks=2)
    ('0', '2')
    """
    _check(function, ranks, timeout_s)
    # Imported here, because it imports torch, and `import meshwright` must not.
    from meshwright.processes.local.run_in_ranks import run_in_ranks

    try:
        value: Value = run_in_ranks(function, args, kwargs, ranks, _device(device, ranks), timeout_s)
    except MeshwrightError as error:
        raise error.with_traceback(None) from None  # the message has the rank's traceback; the launcher's is of no use
    return value


def _check(function: object, ranks: object, timeout_s: object) -> None:
    # Imported here, because it imports pydantic, which `import meshwright` does not need.
    from meshwright.numbers.limits import MOST_RANKS_HERE, MOST_RANKS_PER_CORE

    env = environment.read_environment()
    if env.launched:
        raise InputError(
            f"mw.launch was called in a process that is a rank already (RANK={env.rank}, WORLD_SIZE={env.size}):"
            " call it outside of the ranks; if you have set these environment variables yourself, remove them"
        )
    if not callable(function):
        raise InputError(
            f"mw.launch takes a function, and its arguments after it; {function!r} is none:"
            " write mw.launch(train, 3), not mw.launch(train(3))"
        )
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InputError(f"ranks={ranks!r}: write a whole number from 1 on")
    most = min(MOST_RANKS_HERE, MOST_RANKS_PER_CORE * (os.cpu_count() or 1))
    if ranks > most:
        raise InputError(f"ranks={ranks}: this machine starts at most {most}")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise InputError(f"timeout_s={timeout_s!r}: write a number of seconds above 0, or None for no limit")


def _device(device: object, ranks: int) -> Literal["cuda", "cpu"]:
    """Returns the device of the ranks. It initializes CUDA in no process."""
    if device not in ("cuda", "cpu", None):
        raise InputError(f"device={device!r}: write 'cuda', 'cpu', or None for the GPUs if there are any")
    if device == "cpu":
        return "cpu"
    import torch

    gpus = torch.cuda.device_count()
    if device is None and gpus == 0:
        return "cpu"
    if gpus < ranks:
        raise InputError(
            f"{ranks} ranks need {ranks} GPUs, and this machine has {gpus}: start fewer ranks, or write device='cpu'"
        )
    return "cuda"
