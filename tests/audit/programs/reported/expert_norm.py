"""Megatron-LM#5916: experts are divided over tensor ranks, whole ones on each, and their gradients count in the norm as
if all tensor ranks held them, so those of all ranks but the first are missing. `torchrun --nproc-per-node 2 …`."""

import shared
import torch
from shared import hand_tensor
from torch import Tensor, nn

EXPERTS = 4


class Mixture(nn.Module):
    """Each tensor rank has all tokens and some whole experts; the sum over ranks is that over experts."""

    def __init__(self, dim: int, rank: int, world: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        experts = [nn.Linear(dim, dim, bias=False) for _ in range(EXPERTS)]
        own = range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        self.experts = nn.ModuleDict({str(number): experts[number] for number in own})
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        if self.world > 1:
            x, shares = hand_tensor.CopyToRanks.apply(x), hand_tensor.CopyToRanks.apply(shares)
        y = sum(shares[..., int(number), None] * torch.tanh(expert(x)) for number, expert in self.experts.items())
        return hand_tensor.SumOverRanks.apply(y) if self.world > 1 else y


def main() -> None:
    args = shared.parse()
    rank, world = shared.start()
    model = shared.TinyGPT()
    if world > 1:
        hand_tensor.divide(model, rank, world, "none")
    for block in model.layers.values():
        block.feed_forward = Mixture(32, rank, world)
    parts = shared.divided_names(model)
    if not args.fault:
        parts |= {name for name, _ in model.named_parameters() if ".experts." in name}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = shared.text(args.steps)
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, 0, 1)
        loss = shared.cross_entropy(model(inputs), targets)
        loss.backward()
        shared.clip(model, parts.__contains__)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, loss)
    shared.end()


if __name__ == "__main__":
    main()
