"""A perceptron with matrices of which an audit records sketches, under DDP, FSDP1, FSDP2 or tensor parallelism."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROWS = 8
FAULTS = ("none", "row", "world_size", "no_sync", "norm_of_own_part", "betas", "weight_decay", "reduced_in_bf16")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


def divided(model: nn.Sequential, layout: str, world: int) -> nn.Module:
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp1":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
        )
    mesh = init_device_mesh("cpu", (world,))
    if layout == "fsdp2":
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    for block in model:
        if isinstance(block, Block):
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def clip(model: nn.Module, layout: str, fault: str) -> None:
    if layout == "fsdp1":
        model.clip_grad_norm_(1.0)
    elif fault == "norm_of_own_part":
        own = [value.grad.to_local() if isinstance(value.grad, DTensor) else value.grad for value in model.parameters()]
        norm = torch.nn.utils.get_total_norm(own)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=("ddp", "fsdp1", "fsdp2", "tensor"), default="ddp")
    parser.add_argument("--width", type=int, default=520)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Block(args.width), Block(args.width), nn.Linear(args.width, 10))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = divided(model, args.layout, world)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,
        betas=(0.9, 0.5) if args.fault == "betas" else (0.9, 0.999),
        weight_decay=0.3 if args.fault == "weight_decay" else 0.1,
    )
    parts = 1 if args.layout == "tensor" else world
    generator = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        inputs = torch.randn(ROWS, args.width, generator=generator)
        targets = torch.randint(10, (ROWS,), generator=generator)
        share = slice(0, ROWS) if parts == 1 else slice(rank * ROWS // parts, (rank + 1) * ROWS // parts)
        syncs = args.fault != "no_sync" or not isinstance(model, DistributedDataParallel)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16), model.no_sync() if not syncs else noop():
            loss = torch.nn.functional.cross_entropy(model(inputs[share]).float(), targets[share])
        if args.fault == "world_size":
            loss = loss * world
        if syncs:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
        change_gradients(model, args.fault, args.bf16, rank == world - 1)
        clip(model, args.layout, args.fault)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    if "RANK" in os.environ:
        dist.destroy_process_group()


def change_gradients(model: nn.Module, fault: str, bf16: bool, is_last: bool) -> None:
    with torch.no_grad():
        for name, value in model.named_parameters():
            gradient = value.grad.to_local() if isinstance(value.grad, DTensor) else value.grad
            if fault == "row" and is_last and name.endswith("1.up.weight"):
                gradient[7] *= 1.1 if bf16 else 1.01
            if fault == "reduced_in_bf16":
                gradient.copy_(gradient.bfloat16())


noop = functools.partial(torch.set_grad_enabled, True)


if __name__ == "__main__":
    main()
