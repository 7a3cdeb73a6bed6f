"""The process group of all ranks, for functions that tests run in ranks."""

import torch.distributed as dist


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
