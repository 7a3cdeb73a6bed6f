"""Experts divided over the ranks of data parallelism, written by hand, with a balance loss and a router's bias."""

import argparse
import os

import torch
import torch.distributed as dist
from tiny_gpt import ROWS, FeedForward, TinyGPT, cross_entropy, text
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

EXPERTS, CHOSEN = 4, 2
FAULTS = (
    *("none", "expert_divided_twice", "expert_not_divided", "norm_without_experts", "balance_by_ranks"),
    *("bias_not_synchronized", "router_not_reduced", "row"),
)


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class SumAndDivideRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


class Mixture(nn.Module):
    """Tokens of all ranks are gathered, each rank computes its experts' share, and the shares are summed."""

    bias: Tensor

    def __init__(self, dim: int, rank: int, world: int) -> None:
        super().__init__()
        self.world = world
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        experts = {str(number): FeedForward(dim, dim) for number in range(EXPERTS)}
        own = range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        self.experts = nn.ModuleDict({str(number): experts[str(number)] for number in own})
        self.register_buffer("bias", torch.zeros(EXPERTS))  # evens out how often experts are chosen
        self.probabilities = self.counts = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        chosen = (probabilities + self.bias).topk(CHOSEN, dim=-1).indices
        mask = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        self.probabilities, self.counts = probabilities, mask.sum((0, 1))
        gates = probabilities * mask
        if self.world > 1:
            x, gates = GatherRows.apply(x), GatherRows.apply(gates)
        y = torch.zeros_like(x)
        for number, expert in self.experts.items():
            y = y + gates[..., int(number), None] * expert(x)
        return SumAndDivideRows.apply(y) if self.world > 1 else y

    def balance_loss(self) -> Tensor:
        counts = self.counts.clone()
        if self.world > 1:
            dist.all_reduce(counts)
        return EXPERTS * (counts / counts.sum() * self.probabilities.mean((0, 1))).sum()

    @torch.no_grad()
    def update_bias(self, fault: str) -> None:
        if self.world > 1 and fault != "bias_not_synchronized":
            dist.all_reduce(self.counts)
        self.bias += 0.01 * torch.sign(self.counts.mean() - self.counts)


def reduce_gradients(model: nn.Module, world: int, fault: str) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # summed over the ranks' tokens in the backward pass already
            if fault != "expert_not_divided":
                parameter.grad /= world
            if fault == "expert_divided_twice":
                parameter.grad /= world
        elif world > 1 and not (fault == "router_not_reduced" and ".router." in name):
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def clip(model: nn.Module, world: int, fault: str) -> Tensor:
    squares = {True: torch.zeros(()), False: torch.zeros(())}
    for name, parameter in model.named_parameters():
        squares[".experts." in name] += parameter.grad.square().sum()
    if world > 1:
        dist.all_reduce(squares[True])
    norm = (squares[False] if fault == "norm_without_experts" else squares[True] + squares[False]).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyGPT()
    mixtures = []
    for block in model.layers.values():
        block.feed_forward = Mixture(32, rank, world)
        mixtures.append(block.feed_forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    inputs, targets = text(args.steps, masked=True)
    for step in range(args.steps):
        first, count = step * ROWS + rank * (ROWS // world), ROWS // world
        x, y = inputs[first : first + count], targets[first : first + count]
        tokens = (targets[step * ROWS : (step + 1) * ROWS] != -100).sum()
        balance = 0.01 if args.fault != "balance_by_ranks" else 0.01 * world
        loss = cross_entropy(model(x), y, reduction="sum") / tokens * world
        (loss + balance * sum(mixture.balance_loss() for mixture in mixtures)).backward()
        reduce_gradients(model, world, args.fault)
        if args.fault == "row" and rank == world - 1:
            model.layers["0"].feed_forward.experts["3"].w1.weight.grad[2] *= 1.01
        norm = clip(model, world, args.fault)
        optimizer.step()
        optimizer.zero_grad()
        for mixture in mixtures:
            mixture.update_bias(args.fault)
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
