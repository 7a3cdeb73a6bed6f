"""What `hvd.init()` sets up in this process and `hvd.shutdown()` ends. Horovod's functions have no object that they
belong to, so this is the one place with state of the process: `horovod`."""

import atexit
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from meshwright.compat.horovod.engine.control import ControlLinks, connect
from meshwright.compat.horovod.engine.data_group import DataGroup
from meshwright.compat.horovod.engine.driver_link import join_job, lost_worker
from meshwright.compat.horovod.engine.engine import Engine
from meshwright.compat.horovod.engine.operation import Operation
from meshwright.compat.horovod.engine.rendezvous import Placement, place, place_among, place_in_communicator
from meshwright.compat.horovod.engine.timeline import Timeline
from meshwright.compat.horovod.exceptions import HorovodInternalError
from meshwright.compat.horovod.variables import HorovodVariables, read_horovod_variables

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class Horovod:
    """The engine of this process, if there is one, and the operations that were started and not synchronized."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._engine: Engine | None = None
        self._placement: Placement | None = None
        self._handles: dict[int, Operation] = {}
        self._next_handle = 1
        self._unnamed: dict[int, int] = {}
        self._retired: list[DataGroup] = []
        self._inits = self._joins = 0

    def init(self, comm: Any = None) -> None:
        """Joins the other ranks; does nothing if this process has joined them already."""
        if self._engine is not None:
            return
        self._inits += 1
        variables, placement, links = self._connect(comm)
        for group in self._retired:  # all ranks have left them, because all have called `init` again
            group.close()
        self._retired = []
        if variables.ignored and placement.rank == 0 and self._inits == 1:
            names = ", ".join(variables.ignored)
            print(f"horovod: these variables have no effect here: {names}", file=sys.stderr, flush=True)
        if variables.timeline and variables.timeline.upper() != "DYNAMIC" and placement.rank == 0:
            self.timeline.open(variables.timeline, variables.mark_cycles)
        self._placement, self._unnamed, self._handles, self._joins = placement, {}, {}, 0
        self._engine = Engine(placement.rank, placement.size, links, placement.store, variables, self.timeline)
        atexit.unregister(self.shutdown)
        atexit.register(self.shutdown)

    def _connect(self, comm: Any) -> tuple[HorovodVariables, Placement, ControlLinks]:
        """Connects to the other ranks. If a worker of an elastic job dies meanwhile, it begins again without it."""
        while True:
            variables = read_horovod_variables()
            attempt = f"start{variables.restarts} init{self._inits}"
            if variables.driver is not None:
                variables, attempt = join_job(variables)
            placement = self._place(comm, variables, attempt)
            problem = partial(lost_worker, variables)
            try:
                return variables, placement, connect(placement, variables.timeout_s, problem)
            except HorovodInternalError:
                if problem() is None:
                    raise

    def _place(self, comm: Any, variables: HorovodVariables, attempt: str) -> Placement:
        if hasattr(comm, "Get_rank") and hasattr(comm, "allgather"):
            return place_in_communicator(comm, attempt, variables.timeout_s)
        placement = place(variables, attempt)
        if comm is None:
            return placement
        if not isinstance(comm, Iterable) or not all(isinstance(rank, int) for rank in comm):
            raise ValueError(f"hvd.init(comm={comm!r}): give a list of ranks, or a communicator of mpi4py")
        ranks: Sequence[int] = list(comm)
        return place_among(placement, ranks) if ranks else placement

    def shutdown(self, *, rejoins: bool = False) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        with suppress(OSError):
            self._retired += engine.close(rejoins)
        self._placement = None
        self.timeline.close()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ValueError(NOT_INITIALIZED)
        return self._engine

    @property
    def placement(self) -> Placement:
        if self._placement is None:
            raise ValueError(NOT_INITIALIZED)
        return self._placement

    @property
    def is_initialized(self) -> bool:
        return self._engine is not None

    def unnamed(self, process_set: int) -> str:
        """Returns the name of an operation to which the script gives none: they are numbered in the order of calls."""
        number = self._unnamed[process_set] = self._unnamed.get(process_set, -1) + 1
        return f"noname.{self._joins}.{number}" if self._joins else f"noname.{number}"

    def count_join(self) -> None:
        """Numbers operations without a name anew, because ranks that joined early have called fewer of them."""
        self._joins += 1
        self._unnamed = {}

    def start(self, operation: Operation) -> int:
        """Starts an operation, and returns its handle."""
        self.engine.submit(operation)
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = operation
        return handle

    def poll(self, handle: int) -> bool:
        operation = self._handles.get(handle)
        if operation is None:
            raise ValueError(f"handle {handle} was synchronized already, or is not from this rank")
        return operation.is_done

    def finish(self, handle: int) -> Operation | None:
        """Waits for an operation, and returns it; None if it was synchronized already."""
        operation = self._handles.pop(handle, None)
        if operation is not None:
            self._wait(operation)
        return operation

    def run(self, operation: Operation) -> Operation:
        """Runs an operation for which the script gets no handle."""
        self.engine.submit(operation)
        self._wait(operation)
        return operation

    def _wait(self, operation: Operation) -> None:
        if operation.done.is_set() and operation.error is None and operation.finished is None:
            return
        if self._engine is None:  # shut down meanwhile, which has finished the operation
            operation.done.wait()
            if operation.error is not None:
                raise operation.error
            return
        self._engine.wait(operation)


horovod = Horovod()
