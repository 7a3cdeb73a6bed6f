"""torchtitan#2318: the loss is divided by the tokens of all ranks, and DistributedDataParallel, or the replicas of a
hybrid mesh, average its gradients once more. `torchrun --nproc-per-node 2 averaged_again.py --fault`, or 4 ranks with
`--hybrid`."""

import shared
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


def add_gradients(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def main() -> None:
    args = shared.parse("--hybrid")
    rank, world = shared.start()
    model: torch.nn.Module = shared.TinyGPT()
    if args.hybrid and world > 1:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0 if args.fault else 1.0)
                module.set_force_sum_reduction_for_comms(True)
    elif world > 1:
        model = DistributedDataParallel(model)
        if not args.fault:
            model.register_comm_hook(None, add_gradients)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = shared.text(args.steps, masked=True)
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, rank, world)
        tokens = shared.summed((targets != -100).sum())
        loss = shared.sum_of_losses(model(inputs), targets) / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, shared.summed(loss))
    shared.end()


if __name__ == "__main__":
    main()
