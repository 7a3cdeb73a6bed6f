"""`World`: which rank this process is, of how many, on which device; and how it joins the process group."""

import itertools
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.processes import environment, loopback
from meshwright.processes.agreement import agree, versions
from meshwright.processes.launchers.store import open_store, store_of_own_user
from meshwright.processes.launchers.store_place import StorePlace
from meshwright.processes.network.interface import use_interface, use_interface_towards
from meshwright.processes.network.machine import rank_by_machine
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.processes.token.admission import enter
from meshwright.processes.token.run_token import find_token
from meshwright.processes.token.signed_store import SignedStore
from meshwright.processes.torch_private import add_gloo_for_cpu_tensors

# A process that has left its group may join again: it uses the same store of another launcher's ranks, which it serves
# if it is rank 0, and other keys in it.
_stores: dict[StorePlace, SignedStore] = {}
_joins = itertools.count()


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
    because the script, Ray Train or an earlier session has made it, that one is used. A process that no launcher
    started and that is in no process group is a world of one rank. Ranks of another launcher than meshwright's, and
    those on several machines, first show each other the token of the run, and agree on the versions of torch and
    meshwright; on several machines, they are numbered machine by machine. Processes of other users of this machine
    cannot connect to this one."""
    if dist.is_initialized():
        admit_own_user_only()
        return _world_of_group(device)
    env = environment.read_environment()
    if env.launched:
        admit_own_user_only()
    torch_device = _torch_device(device, env.local_rank)
    if not env.launched:
        environment.check_can_be_alone()
        return World(0, 0, 1, 1, 0, torch_device, None)
    timeout, number, local_size = timedelta(seconds=timeout_s), env.rank, env.local_size
    if env.fork_server_pid is not None:
        store: dist.Store = loopback.connect_store(*environment.store_address(), timeout)
        # The store outlives a restart: without a prefix, new ranks would read the addresses of the previous attempt.
        store = dist.PrefixStore(f"attempt{env.attempt}", store)
        if environment.is_on_several_machines():
            store = enter(store, find_token(False), env.rank, env.size, "train --nodes", timeout_s)
            agree(versions(), env.rank, env.size, store, "versions", timeout_s)
        group_store = store
    else:
        rank = environment.launched_rank()
        assert rank is not None
        place = environment.store_of(rank)
        if rank.is_on_one_machine:
            use_interface(loopback.interface())
        else:
            use_interface_towards(place.host)
        if place not in _stores:
            _stores[place] = open_store(rank, place, timeout_s)
        store = group_store = _stores[place].part(f"attempt{env.attempt}/join{next(_joins)}")
        agree(versions(), rank.rank, rank.size, store, "versions", timeout_s)
        if not rank.is_on_one_machine:
            number, ranks_here = rank_by_machine(rank.rank, rank.size, store, timeout_s)
            local_size = ranks_here if rank.counts_local_ranks else local_size
        if place.is_served and rank.is_on_one_machine:
            group_store = store_of_own_user(store, number, timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch_device.type == "cuda" else "gloo",
        store=group_store,
        rank=number,
        world_size=env.size,
        timeout=timeout,
    )
    return World(number, env.local_rank, env.size, local_size, env.attempt, torch_device, store)


def _world_of_group(device: str) -> World:
    """Returns the world of the process group that exists already, whichever its backend is. Its maker may have set some
    of a launcher's variables only, as Lightning does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    add_gloo_for_cpu_tensors()
    env = None
    with suppress(InputError):
        env = environment.read_environment()
    if env is not None and env.launched and env.size == size:
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
