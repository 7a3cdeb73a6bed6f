"""A script for Horovod, started by its drop-in: `python -m meshwright.compat.horovod -np 2 horovod_gpt.py`."""

import argparse

import horovod.torch as hvd
import torch
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text

FAULTS = (
    "none",
    "sum",
    "clipped_before_synchronize",
    "no_broadcast",
    "mean_over_ranks",
    "learning_rate",
    "fp16",
    "row",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    hvd.init()
    rank, world = hvd.rank(), hvd.size()
    torch.manual_seed(rank)
    model = TinyGPT()
    rate = 0.05 * world if args.fault == "learning_rate" else 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        op=hvd.Sum if args.fault == "sum" else hvd.Average,
        compression=hvd.Compression.fp16 if args.fault == "fp16" else hvd.Compression.none,
    )
    if args.fault != "no_broadcast":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    inputs, targets = text(args.steps, masked=True)
    for step in range(args.steps):
        first, count = step * ROWS + rank * (ROWS // world), ROWS // world
        x, y = inputs[first : first + count], targets[first : first + count]
        tokens = (y != -100).sum().float()
        if args.fault != "mean_over_ranks":
            tokens = hvd.allreduce(tokens, op=hvd.Average)
        loss = cross_entropy(model(x), y, reduction="sum") / tokens
        loss.backward()
        if args.fault == "clipped_before_synchronize":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        else:
            optimizer.synchronize()
            if args.fault == "row" and rank == 0:
                model.layers["0"].feed_forward.w3.weight.grad[1] *= 1.01
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        mean = hvd.allreduce(loss.detach(), op=hvd.Average)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} norm {norm.item():.6f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
