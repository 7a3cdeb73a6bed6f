"""Times collectives between the ranks of the default process group, for several tensor sizes and numbers of ranks."""

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from meshwright.calibrate.timing import elapsed
from meshwright.cluster.cluster import Collective

ROUNDS = 3
SIZES = {"cpu": [2**10, 2**14, 2**18, 2**20, 2**22, 2**24], "cuda": [2**10, 2**14, 2**18, 2**20, 2**22, 2**24, 2**28]}

Curves = dict[Collective, dict[int, list[tuple[int, float]]]]


def measure_curves(collectives: list[Collective], device: torch.device) -> Curves:
    """Returns a list of points (bytes, seconds) for each collective and number of ranks. Every rank calls this; only
    the result on rank 0 is complete, because the groups of fewer ranks leave the last ranks out."""
    world_size = dist.get_world_size()
    group_sizes = [ranks for ranks in (2, 4, 8, 16) if ranks < world_size] + [world_size]
    curves: Curves = {collective: {} for collective in collectives}
    for ranks in group_sizes:
        group = dist.new_group(list(range(ranks)))  # every rank must call new_group, also those outside of the group
        if dist.get_rank() < ranks:
            for collective in collectives:
                curves[collective][ranks] = [
                    (size, _seconds(collective, size, ranks, device, group)) for size in SIZES[device.type]
                ]
        dist.barrier()
    return curves


def _seconds(collective: Collective, size: int, ranks: int, device: torch.device, group: dist.ProcessGroup) -> float:
    run = collective_operation(collective, size, ranks, device, group)
    repeats = 10 if size <= 2**20 else 3
    run()
    return median(elapsed(run, device, repeats) / repeats for _ in range(ROUNDS))


def collective_operation(
    collective: Collective, size: int, ranks: int, device: torch.device, group: dist.ProcessGroup
) -> Callable[[], object]:
    """Returns a function that runs the collective on a whole tensor of `size` bytes."""
    elements = size // 4
    whole = torch.ones(elements, device=device)
    share = torch.ones(elements // ranks, device=device)
    even = whole[: share.numel() * ranks]
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(even, share, group=group)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(share, even, group=group)
    if collective == "all_to_all":
        received = torch.empty_like(even)
        return lambda: dist.all_to_all_single(received, even, group=group)
    if collective == "broadcast":
        return lambda: dist.broadcast(whole, src=0, group=group)
    return lambda: _send_and_confirm(whole, group)


def _send_and_confirm(whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The group's first rank sends the tensor to the second, which confirms its arrival. Other ranks do nothing."""
    rank = dist.get_rank(group)
    if rank == 0:
        dist.send(whole, group=group, group_dst=1)
        dist.recv(whole[:1], group=group, group_src=1)
    elif rank == 1:
        dist.recv(whole, group=group, group_src=0)
        dist.send(whole[:1], group=group, group_dst=0)
