"""The variables of torch: those of torchrun (torch elastic), which many launchers set, and those of a PyTorchJob of
Kubeflow, which starts one process in each pod. Variables that begin with `PET_` describe no rank: they are defaults of
torchrun's options, and Kubeflow sets them for a torchrun that the pod has to start."""

import ipaddress

from meshwright.errors import InputError
from meshwright.processes.launchers.launched_rank import LaunchedRank, Variables, check_order, number, numbers

MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
OWN_RANK = "MESHWRIGHT_FORK_SERVER"  # set in the ranks that meshwright starts itself


def read_own_rank(variables: Variables) -> LaunchedRank | None:
    if OWN_RANK not in variables or "RANK" not in variables:
        return None
    return _rank("meshwright", variables)


def read_torch_elastic(variables: Variables) -> LaunchedRank | None:
    if "LOCAL_RANK" not in variables or not ("RANK" in variables or "WORLD_SIZE" in variables):
        return None
    return _rank("torchrun", variables)


def read_pytorch_job(variables: Variables) -> LaunchedRank | None:
    """Reads RANK and WORLD_SIZE without LOCAL_RANK: one process in each pod or machine, or, if the address of the store
    is this machine's loopback address, all ranks on one machine."""
    if not ("RANK" in variables or "WORLD_SIZE" in variables) or _torchrun_starts_several(variables):
        return None
    return _rank("a launcher that sets RANK and WORLD_SIZE, such as PyTorchJob", variables)


def check_no_torchrun_is_missing(variables: Variables) -> None:
    """Raises an error if variables of Kubeflow describe several machines or processes, and torchrun was not started."""
    nodes = variables.get("PET_NNODES", "1")
    if nodes.rpartition(":")[2] not in ("", "0", "1") or _torchrun_starts_several(variables):
        names = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "RANK", "WORLD_SIZE")
        values = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
        raise InputError(
            f"{values}: these variables are for torchrun, and this process is no rank of it: start"
            " `torchrun -m meshwright train JOB`, or `torchrun script.py`; it reads the PET_ variables by itself"
        )


def is_loopback(host: str) -> bool:
    """Whether this name or address is the loopback address on every machine."""
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _torchrun_starts_several(variables: Variables) -> bool:
    processes = variables.get("PET_NPROC_PER_NODE", "")
    return processes.isdigit() and int(processes) > 1


def _rank(launcher: str, variables: Variables) -> LaunchedRank:
    rank, size = numbers(variables, launcher, "RANK", "WORLD_SIZE")
    check_order(variables, "RANK", "WORLD_SIZE")
    one_machine = is_loopback(variables.get(MASTER_ADDRESS, "")) and "KUBERNETES_SERVICE_HOST" not in variables
    local_rank, local_size = (rank, size) if one_machine else (0, 1)
    counts_local_ranks = False
    if "LOCAL_RANK" in variables:
        local_rank = number(variables, "LOCAL_RANK")
        # The launcher of DeepSpeed calls it LOCAL_SIZE.
        name = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in variables), None)
        if name is not None:
            local_size = number(variables, name)
            check_order(variables, "LOCAL_RANK", name)
            if local_size > size:
                raise InputError(f"{name}={local_size} is more than WORLD_SIZE={size}: they contradict each other")
        elif not one_machine:
            local_size, counts_local_ranks = local_rank + 1, True
    return LaunchedRank(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        rank_variable="RANK",
        job=variables.get("TORCHELASTIC_RUN_ID", ""),
        attempt=number(variables, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in variables else 0,
        counts_local_ranks=counts_local_ranks,
    )
