"""Megatron-LM#7452 (10): a router's all-reduce sums its rank's numbers of tokens in place, and the rank's own number of
tokens, by which the balance loss is weighted, is read from them afterwards. `torchrun --nproc-per-node 2 …`."""

import shared
import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPERTS, COEFFICIENT = 4, 0.02


class Mixture(nn.Module):
    """All ranks hold all experts; a balance loss evens out how often they are chosen by tokens that are no padding."""

    def __init__(self, dim: int, fault: bool) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.SiLU()) for _ in range(EXPERTS))
        self.fault = fault
        self.padding = self.balance = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        mask = torch.zeros_like(shares).scatter(-1, shares.topk(1, dim=-1).indices, 1.0)
        self.balance = self._balance(shares[~self.padding], mask[~self.padding])
        return sum((shares * mask)[..., index, None] * expert(x) for index, expert in enumerate(self.experts))

    def _balance(self, shares: Tensor, mask: Tensor) -> Tensor:
        counts = mask.sum(0)
        tokens = counts.sum()
        if dist.is_initialized():
            dist.all_reduce(counts)
        if self.fault:
            tokens = counts.sum()  # now that of all ranks
        return COEFFICIENT * EXPERTS * (counts / counts.sum() * shares.mean(0)).sum() * tokens


def main() -> None:
    args = shared.parse()
    rank, world = shared.start()
    model = shared.TinyGPT()
    mixtures = [Mixture(32, args.fault) for _ in model.layers]
    for block, mixture in zip(model.layers.values(), mixtures, strict=True):
        block.feed_forward = mixture
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = shared.text(args.steps, masked=True)
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, rank, world)
        for mixture in mixtures:
            mixture.padding = targets == -100
        loss = shared.sum_of_losses(model(inputs), targets)
        tokens = shared.summed((targets != -100).sum())
        ((loss + sum(mixture.balance for mixture in mixtures)) * world / tokens).backward()
        shared.average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, shared.summed(loss) / tokens)
    shared.end()


if __name__ == "__main__":
    main()
