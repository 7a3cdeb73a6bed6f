"""prime-rl#2358: each rank divides the losses of its micro-batches by the tokens of its own samples, and FSDP averages
over ranks. `torchrun --nproc-per-node 2 own_tokens.py --fault`."""

import shared
import torch
from torch.distributed.fsdp import fully_shard

MICROBATCHES = 2


def main() -> None:
    args = shared.parse()
    rank, world = shared.start()
    model = shared.TinyGPT()
    if world > 1:
        for block in model.layers.values():
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = shared.text(args.steps, masked=True)
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, rank, world)
        own = (targets != -100).sum()
        scale = own if args.fault else shared.summed(own) / world
        total = torch.zeros(())
        for part, goal in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = shared.sum_of_losses(model(part), goal)
            (loss / scale).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, shared.summed(total) / shared.summed(own))
    shared.end()


if __name__ == "__main__":
    main()
