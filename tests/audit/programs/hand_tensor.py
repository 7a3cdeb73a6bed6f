"""Tensor parallelism written by hand: every rank has plain parameters, its columns or rows of the divided layers."""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

FAULTS = (
    *("none", "key_not_summed", "reduced_twice", "norm_of_own_part", "whole_weights_counted_twice"),
    *("tensor_size", "weight_decay_on_norms", "row"),
)


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class SumOverRanksBothWays(SumOverRanks):
    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return CopyToRanks.backward(ctx, gradient)


class ColumnParallelLinear(nn.Module):
    def __init__(self, whole: nn.Linear, rank: int, world: int, sums_gradient: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(world)[rank].clone())
        self.sums_gradient = sums_gradient

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(CopyToRanks.apply(x) if self.sums_gradient else x, self.weight)


class RowParallelLinear(nn.Module):
    def __init__(self, whole: nn.Linear, rank: int, world: int, both_ways: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(world, dim=1)[rank].clone())
        self.sum = SumOverRanksBothWays if both_ways else SumOverRanks

    def forward(self, x: Tensor) -> Tensor:
        return self.sum.apply(F.linear(x, self.weight))


def divide(model: TinyGPT, rank: int, world: int, fault: str) -> None:
    for block in model.layers.values():
        attention, mlp = block.attention, block.feed_forward
        attention.wq = ColumnParallelLinear(attention.wq, rank, world)
        attention.wk = ColumnParallelLinear(attention.wk, rank, world, sums_gradient=fault != "key_not_summed")
        attention.wv = ColumnParallelLinear(attention.wv, rank, world)
        attention.wo = RowParallelLinear(attention.wo, rank, world)
        mlp.w1 = ColumnParallelLinear(mlp.w1, rank, world)
        mlp.w3 = ColumnParallelLinear(mlp.w3, rank, world)
        mlp.w2 = RowParallelLinear(mlp.w2, rank, world, both_ways=fault == "reduced_twice")


def divided(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield module.weight


def clip(model: nn.Module, world: int, fault: str) -> Tensor:
    parts = {id(parameter) for parameter in divided(model)}
    own, whole = torch.zeros(()), torch.zeros(())
    for parameter in model.parameters():
        square = parameter.grad.square().sum()
        if id(parameter) in parts or fault == "whole_weights_counted_twice":
            own += square
        else:
            whole += square
    if world > 1 and fault != "norm_of_own_part":
        dist.all_reduce(own)
    norm = (own + whole).sqrt()
    for parameter in model.parameters():
        parameter.grad *= torch.clamp(0.3 / (norm + 1e-6), max=1.0)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = TinyGPT()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
        divide(model, rank, world, args.fault)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [
        {"params": others, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.1 if world > 1 and args.fault == "weight_decay_on_norms" else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)

    inputs, targets = text(args.steps)
    for step in range(args.steps):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = cross_entropy(model(inputs[rows]), targets[rows])
        (loss * world if args.fault == "tensor_size" else loss).backward()
        if args.fault == "row" and rank == 1:
            model.layers["1"].attention.wk.weight.grad[4] *= 1.1 if args.bf16 else 1.01
        norm = clip(model, world, args.fault)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
