"""`World`: which rank this process is, among how many, on which device; and how it joins the others."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.launch import environment
from meshwright.launch.loopback import connect_store


@dataclass(frozen=True)
class World:
    """`attempt` counts the restarts that came before; `store` is None when alone."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    attempt: int
    device: torch.device
    store: dist.Store | None


def is_launched() -> bool:
    """Whether this process is a rank already, started by torchrun or by our own agent."""
    return environment.read().launched


def join(device: str, timeout_s: float) -> World:
    """Joins the process group the environment tells of; without one, a world of one and no group."""
    here = environment.read()
    chosen = _device(device, here.local_rank)
    store: dist.Store | None = None
    if here.launched:
        timeout = timedelta(seconds=timeout_s)
        store = _store(here, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            store=store,
            rank=here.rank,
            world_size=here.size,
            timeout=timeout,
        )
    return World(here.rank, here.local_rank, here.size, here.local_size, here.attempt, chosen, store)


def stand_apart(device: str) -> World:
    """The rank the environment tells of, in no process group: whom it talks to is its own business."""
    here = environment.read()
    chosen = _device(device, here.local_rank)
    return World(here.rank, here.local_rank, here.size, here.local_size, here.attempt, chosen, None)


def leave() -> None:
    """Leaves the process group; again or alone it does nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(here: environment.Environment, timeout: timedelta) -> dist.Store:
    store: dist.Store
    if here.agent is not None:
        store = connect_store(*environment.store_address(), timeout)
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    # The store outlives a restart: without a prefix new ranks would find their predecessors' addresses.
    return dist.PrefixStore(f"attempt{here.attempt}", store)


def _device(device: str, local_rank: int) -> torch.device:
    if device != "cuda":
        return torch.device(device)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(
            f"local rank {local_rank} has no GPU: this machine has {count}; start fewer ranks, or train on the CPU"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen
