"""The private functions of torch that launching calls. They were seen to work on torch 2.11, 2.13 and 2.15.

`local/agent.py` and `local/replacing_agent.py` also override private methods of elastic's agent, listed in agent.py.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from signal import SIGTERM, Signals
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing import api as elastic_processes

from meshwright.processes.network.own_user import admit_own_user_only


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a Gloo process group that is not registered with torch.distributed. Its type is `Any` because the type
    stubs of torch lack the send and receive methods of this class."""
    admit_own_user_only()
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def set_default_timeout(group: Any, timeout: timedelta) -> None:
    """Sets the timeout of the operations that the group starts from now on."""
    group._set_default_timeout(timeout)


def add_gloo_for_cpu_tensors() -> None:
    """Lets the default process group send CPU tensors through Gloo if its own backend, such as NCCL, cannot send them.
    Groups that are made from it later can send them, too. All ranks call this together."""
    config = dist.get_backend_config()
    if "cpu:" in config:
        return
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    gloo: Any = dist.new_group(backend="gloo")
    group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, gloo._get_backend(cpu))
    config, world = f"cpu:gloo,{config}", distributed_c10d._world
    world.pg_map[group] = (config, world.pg_map[group][1])
    world.pg_backend_config[group] = config


class Process(Protocol):
    """The part of `subprocess.Popen` that torch elastic uses."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class _ProcessHandler:
    """Replaces elastic's handler of one process of a worker group."""

    def __init__(self, process: Process, local_rank: int) -> None:
        self.proc = process
        self.local_rank_id = local_rank

    def close(self, death_sig: Signals | None = None) -> None:
        os.killpg(self.proc.pid, death_sig or SIGTERM)


@contextmanager
def elastic_starts_ranks_with(start: Callable[[tuple[str, ...], Mapping[str, str]], Process]) -> Iterator[None]:
    """Within this context torch elastic starts a process by calling `start(arguments, environment)`."""

    def handler(
        entrypoint: str, args: tuple[Any, ...], env: Mapping[str, str], local_rank_id: int, **_: object
    ) -> _ProcessHandler:
        return _ProcessHandler(start(tuple(map(str, args)), {**os.environ, **env}), local_rank_id)

    previous = elastic_processes.get_subprocess_handler
    setattr(elastic_processes, "get_subprocess_handler", handler)  # noqa: B010
    try:
        yield
    finally:
        setattr(elastic_processes, "get_subprocess_handler", previous)  # noqa: B010


def elastic_processes_of(context: Any) -> dict[int, Any]:
    """Returns the processes of elastic's process context by local rank; empty if it has started none."""
    return {} if context is None else {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}


def another_connection(store: Any) -> dist.Store:
    """Returns the same store through another connection. The type stubs of torch lack this method."""
    store = store.clone()
    assert isinstance(store, dist.Store)
    return store


def default_store() -> dist.Store | None:
    """Returns the store of the default process group; None without one."""
    return distributed_c10d._get_default_store() if dist.is_initialized() else None


def flight_recorder_dumps() -> list[str]:
    """Returns what torch has recorded of the last collectives of this process, as JSON: of Gloo, and of NCCL in builds
    that have it. Torch keeps the last 2000 unless TORCH_FR_BUFFER_SIZE says otherwise."""
    dumps: list[str] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            text = dump(includeCollectives=True, onlyActive=False)
            dumps.append(text.decode() if isinstance(text, bytes) else text)
    return dumps
