"""Sharded data parallelism by FSDP2; prompts are no targets, so that ranks have unequal numbers of tokens."""

import argparse
import os

import torch
import torch.distributed as dist
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

FAULTS = ("none", "mean_over_ranks", "data_size", "norm_of_own_shards", "reduced_in_bf16", "betas", "row")


def shard(model: TinyGPT, fault: str) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if fault == "reduced_in_bf16" else None)
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def clip(model: TinyGPT, fault: str) -> torch.Tensor:
    if fault == "norm_of_own_shards":
        shards = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
        norm = torch.nn.utils.get_total_norm(shards)
        for part in shards:
            part.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        return norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
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
    if is_distributed:
        shard(model, args.fault)
    betas = (0.9, 0.999) if args.fault == "betas" else (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=betas)

    inputs, targets = text(args.steps, masked=True)
    for step in range(args.steps):
        first, count = step * ROWS + rank * (ROWS // world), ROWS // world
        x, y = inputs[first : first + count], targets[first : first + count]
        tokens = (y != -100).sum().float()
        if is_distributed and args.fault != "mean_over_ranks":
            dist.all_reduce(tokens)
            tokens /= world  # FSDP takes the mean over the ranks
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = cross_entropy(model(x), y, reduction="sum") / tokens
        if args.fault == "data_size":
            loss = loss * world  # as if FSDP took the sum, which the tokens above already allow for
        loss.backward()
        if args.fault == "row" and rank == 0:
            gradient = model.layers["0"].attention.wo.weight.grad.to_local()
            gradient[5] *= 1.1 if args.bf16 else 1.01
        norm = clip(model, args.fault)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if is_distributed:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.6f} norm {norm.item():.6f}", flush=True)
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
