"""`World`: which rank this process is, of how many, on which device; and how it joins the process group."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.launch import environment
from meshwright.launch.loopback import connect_store
from meshwright.launch.network.interface import use_interface_towards
from meshwright.launch.torch_private import add_gloo_for_cpu_tensors


@dataclass(frozen=True)
class World:
    """Which rank this process is, of how many, and on which device. `attempt` is how often the ranks were restarted
    before. `store` is None for a rank without process group."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    attempt: int
    device: torch.device
    store: dist.Store | None


def is_launched() -> bool:
    """Whether a launcher, such as torchrun or meshwright's own, started this process as a rank."""
    return environment.read_environment().launched


def rank_count() -> int:
    """Returns the number of ranks: of the process group if there is one, otherwise of the launcher's environment
    variables. It is 1 for a process that no launcher started."""
    return dist.get_world_size() if dist.is_initialized() else environment.read_environment().size


def join(device: str, timeout_s: float) -> World:
    """Joins the process group that the environment variables describe. If this process is in a process group already,
    because the script or an earlier session has made it, that one is used. A process that no launcher started and that
    is in no process group is a world of one rank."""
    env = environment.read_environment()
    if dist.is_initialized():
        return _world_of_group(device, env)
    torch_device = _torch_device(device, env.local_rank)
    store: dist.Store | None = None
    if env.launched:
        timeout = timedelta(seconds=timeout_s)
        store = _store(env, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch_device.type == "cuda" else "gloo",
            store=store,
            rank=env.rank,
            world_size=env.size,
            timeout=timeout,
        )
    return World(env.rank, env.local_rank, env.size, env.local_size, env.attempt, torch_device, store)


def _world_of_group(device: str, env: environment.Environment) -> World:
    """Returns the world of the process group that exists already, whichever its backend is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    add_gloo_for_cpu_tensors()
    if env.launched and env.size == size:
        return World(
            rank, env.local_rank, size, env.local_size, env.attempt, _torch_device(device, env.local_rank), None
        )
    # The script has started its ranks itself, and has chosen the GPU of each.
    local_rank = torch.cuda.current_device() if device == "cuda" else rank
    return World(rank, local_rank, size, size, 0, _torch_device(device, local_rank), None)


def world_without_group(device: str) -> World:
    """Returns the rank that the environment variables describe without joining a process group, for ranks that open
    connections of their own."""
    env = environment.read_environment()
    torch_device = _torch_device(device, env.local_rank)
    return World(env.rank, env.local_rank, env.size, env.local_size, env.attempt, torch_device, None)


def leave() -> None:
    """Leaves the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(env: environment.Environment, timeout: timedelta) -> dist.Store:
    store: dist.Store
    if env.fork_server_pid is not None:
        store = connect_store(*environment.store_address(), timeout)
    else:
        if env.local_size < env.size:
            use_interface_towards(environment.store_address()[0])
        store, _, _ = next(dist.rendezvous("env://", env.rank, env.size, timeout=timeout))
    # The store outlives a restart. Without a prefix, new ranks would read the addresses of the previous attempt.
    return dist.PrefixStore(f"attempt{env.attempt}", store)


def _torch_device(device: str, local_rank: int) -> torch.device:
    if device != "cuda":
        return torch.device(device)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(
            f"local rank {local_rank} has no GPU: this machine has {count}; start fewer ranks, or train on the CPU"
        )
    gpu = torch.device("cuda", local_rank)
    torch.cuda.set_device(gpu)
    return gpu
