"""`elastic.run`: runs a training function again after a worker has died, from the state that was committed last, and
after the number of workers has changed."""

import functools
from collections.abc import Callable
from typing import Any

from meshwright.compat.horovod.elastic.state import State
from meshwright.compat.horovod.engine.driver_link import driver_link
from meshwright.compat.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt, MismatchError
from meshwright.compat.horovod.process_sets import init_process_sets
from meshwright.compat.horovod.state import horovod
from meshwright.compat.horovod.variables import read_horovod_variables


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function whose first argument is a `State`. Before it is called, the state is made the same
    on all workers."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        link = driver_link(read_horovod_variables())
        if link is not None:
            link.listeners.append(state.on_hosts_updated)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except MismatchError:
                    raise
                except HorovodInternalError:
                    if link is None and not _all_can_rejoin():
                        raise  # no launcher that could start a worker again
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                _reset()
                state.on_reset()
        finally:
            if link is not None:
                link.listeners.remove(state.on_hosts_updated)

    return wrapper


def _all_can_rejoin() -> bool:
    """Returns whether the other ranks will join again without a launcher: none has died or ended its script."""
    return not horovod.is_initialized or horovod.engine.failure is None or horovod.engine.rank_0_rejoins


def _reset() -> None:
    """Leaves the old ranks and joins the new ones."""
    horovod.shutdown(rejoins=True)
    horovod.init()
    init_process_sets(None)
