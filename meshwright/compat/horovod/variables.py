"""The environment variables of Horovod: which rank this process is, and the settings that begin with `HOROVOD_`. They
are read whenever `hvd.init()` is called, because scripts set some of them themselves."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.processes.environment import launched_rank, store_of, variables_of
from meshwright.processes.launchers.launched_rank import LaunchedRank
from meshwright.processes.launchers.store_place import StorePlace

# Address (host:port) and id by which a worker of an elastic job reports to the launcher that started it.
DRIVER, WORKER = "MESHWRIGHT_HOROVOD_DRIVER", "MESHWRIGHT_HOROVOD_WORKER"

_HONOURED = {
    *(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")),
    *(f"HOROVOD_{name}" for name in ("FUSION_THRESHOLD", "CYCLE_TIME", "CACHE_CAPACITY", "GLOO_TIMEOUT_SECONDS")),
    *(f"HOROVOD_{name}" for name in ("TIMELINE", "TIMELINE_MARK_CYCLES", "DYNAMIC_PROCESS_SETS", "ELASTIC")),
    *(f"HOROVOD_STALL_{name}" for name in ("CHECK_DISABLE", "CHECK_TIME_SECONDS", "SHUTDOWN_TIME_SECONDS")),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_HOSTNAME"),
    *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_MIXED_INSTALL"),  # the choice is always the same
}


@dataclass(frozen=True)
class HorovodVariables:
    """A rank as its launcher describes it, and the settings. `launched` is the rank of another launcher than Horovod's.
    `store` is where the ranks find each other, None for a process that no launcher started; if it is not served, rank 0
    has to serve it.
    `restarts` is how often torchrun has started the ranks again. `driver` is the address of the launcher of an elastic
    job, and `worker` this process's id there. `timeline` is the file of `HOROVOD_TIMELINE`. `ignored` are the variables
    that are set and have no effect."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    launched: LaunchedRank | None
    store: StorePlace | None
    restarts: int
    driver: tuple[str, int] | None
    worker: str
    cycle_s: float
    fusion_bytes: int
    cache_capacity: int
    timeline: str
    mark_cycles: bool
    stall_warning_s: float
    stall_shutdown_s: float
    timeout_s: float
    elastic: bool
    ignored: tuple[str, ...]


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return read_horovod_variables().size > 1


def read_horovod_variables() -> HorovodVariables:
    variables = variables_of(
        "HOROVOD_", "MESHWRIGHT_HOROVOD_", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"
    )
    launched: LaunchedRank | None = None
    rank, size, local_rank, local_size = 0, 1, 0, 1
    if "HOROVOD_RANK" in variables and "HOROVOD_SIZE" in variables:
        rank, size = _integer(variables, "HOROVOD_RANK", 0), _integer(variables, "HOROVOD_SIZE", 1)
        local_rank = _integer(variables, "HOROVOD_LOCAL_RANK", rank)
        local_size = _integer(variables, "HOROVOD_LOCAL_SIZE", size)
    elif launched := launched_rank():
        rank, size = launched.rank, launched.size
        local_rank, local_size = launched.local_rank, launched.local_size
    warning_s = _number(variables, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
    return HorovodVariables(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=_integer(variables, "HOROVOD_CROSS_RANK", rank // max(1, local_size)),
        cross_size=_integer(variables, "HOROVOD_CROSS_SIZE", -(-size // max(1, local_size))),
        launched=launched,
        store=_store_place(variables, size, launched),
        restarts=_integer(variables, "TORCHELASTIC_RESTART_COUNT", 0),
        driver=_address(variables[DRIVER]) if DRIVER in variables else None,
        worker=variables.get(WORKER, ""),
        cycle_s=_number(variables, "HOROVOD_CYCLE_TIME", 5.0) / 1000,
        fusion_bytes=_integer(variables, "HOROVOD_FUSION_THRESHOLD", 128 * 2**20),
        cache_capacity=_integer(variables, "HOROVOD_CACHE_CAPACITY", 1024),
        timeline=variables.get("HOROVOD_TIMELINE", ""),
        mark_cycles=_flag(variables, "HOROVOD_TIMELINE_MARK_CYCLES"),
        stall_warning_s=0.0 if _flag(variables, "HOROVOD_STALL_CHECK_DISABLE") else warning_s,
        stall_shutdown_s=_number(variables, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        timeout_s=_number(variables, "HOROVOD_GLOO_TIMEOUT_SECONDS", 600.0),
        elastic=_flag(variables, "HOROVOD_ELASTIC"),
        ignored=tuple(sorted(name for name in variables if name.startswith("HOROVOD_") and name not in _HONOURED)),
    )


def _store_place(variables: Mapping[str, str], size: int, launched: LaunchedRank | None) -> StorePlace | None:
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in variables:
        port = _integer(variables, "HOROVOD_GLOO_RENDEZVOUS_PORT", 0)
        return StorePlace(variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port, is_served=True)
    if size == 1:
        return None
    if launched is not None:
        return store_of(launched)
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        return StorePlace(variables["MASTER_ADDR"], _integer(variables, "MASTER_PORT", 0))
    raise InputError(
        f"hvd.init(): HOROVOD_SIZE={size}, but MASTER_ADDR and MASTER_PORT, where the ranks find each other, are not"
        f" set: set them, or start the script with `python -m meshwright.compat.horovod -np {size}`"
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _flag(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "0").strip().lower() not in ("", "0", "false")


def _integer(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InputError(f"{name}={text}: write a whole number") from None


def _number(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise InputError(f"{name}={text}: write a number") from None
