"""Data parallelism by DistributedDataParallel, with accumulated gradients: `torchrun --nproc-per-node 2 ddp.py`."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text
from torch.nn.parallel import DistributedDataParallel

FAULTS = (
    *("none", "world_size", "accumulation", "same_rows", "other_order", "no_sync", "reduced_in_bf16"),
    *("weight_decay", "learning_rate", "row"),
)


def reduce_in_bf16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    half = (bucket.buffer() / dist.get_world_size()).bfloat16()
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    is_distributed = "RANK" in os.environ
    rank, world = 0, 1
    if is_distributed:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TinyGPT()
    ddp = DistributedDataParallel(model) if is_distributed else model
    if args.fault == "reduced_in_bf16" and isinstance(ddp, DistributedDataParallel):
        ddp.register_comm_hook(None, reduce_in_bf16)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3 * world if args.fault == "learning_rate" else 1e-3,
        weight_decay=0.0 if args.fault == "weight_decay" else 0.1,
    )

    inputs, targets = text(args.steps)
    if args.fault == "other_order":
        order = torch.randperm(len(inputs))
        inputs, targets = inputs[order], targets[order]
    for step in range(args.steps):
        count = ROWS // world
        first = step * ROWS + (0 if args.fault == "same_rows" else rank * count)
        rows = torch.arange(first, first + count).chunk(args.accumulate)
        total = torch.zeros(())
        for number, part in enumerate(rows):
            is_last = number == len(rows) - 1
            syncs = is_last and args.fault != "no_sync"
            with nullcontext() if syncs or not isinstance(ddp, DistributedDataParallel) else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                    loss = cross_entropy(ddp(inputs[part]), targets[part])
                if args.fault != "accumulation":
                    loss = loss / len(rows)
                if args.fault == "world_size":
                    loss = loss * world
                loss.backward()
            total += loss.detach()
        if args.fault == "row" and rank == world - 1:
            gradient = model.layers["1"].feed_forward.w1.weight.grad
            gradient[3] *= 1.1 if args.bf16 else 1.01
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        if is_distributed:
            dist.all_reduce(total)
            total /= world
        if rank == 0:
            print(f"step {step} loss {total.item():.6f} norm {norm.item():.6f}", flush=True)
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
