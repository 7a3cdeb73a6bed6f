"""PyTorch FSDP2 and torch.compile by hand, as torchtitan applies them: each block is compiled and sharded, then the
whole model is sharded.

Defaults: `fully_shard` as it is. Best: weights stay gathered between forward and backward pass
(`reshard_after_forward=False`), and the optimizer is fused. A model without repeated blocks is compiled and sharded as
a whole."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.blocks.recompute import find_blocks
from validation.bench.peers.task import PeerTask, StepRecorder, run_peer, train_by_hand


def train(task: PeerTask, recorder: StepRecorder) -> None:
    dist.init_process_group(task.backend)
    model = task.model().to(task.device)
    mesh = init_device_mesh(task.device_kind, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if task.precision == "bf16" else MixedPrecisionPolicy()
    reshard = False if task.is_best else None  # None: all blocks, and not the whole model
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    for module in blocks or [model]:
        module.compile()
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    train_by_hand(task, recorder, model, model)


if __name__ == "__main__":
    run_peer(train)
