"""Megatron-LM#7452 (8): attention sinks, one number for each head, are divided over tensor ranks with the heads, but
count as a weight that all ranks hold, so the norm has the first rank's only. `torchrun --nproc-per-node 2 …`."""

import shared
import torch
from shared import hand_tensor
from torch import Tensor, nn


class AttentionWithSinks(shared.Attention):
    """Each head has a logit of its own beside those of the keys, to which attention may go."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (w(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(rows, -1, length, 1)
        shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.wo((shares @ v).transpose(1, 2).reshape(rows, length, -1))


def main() -> None:
    args = shared.parse()
    rank, world = shared.start()
    model = shared.TinyGPT()
    for block in model.layers.values():
        block.attention = AttentionWithSinks(32, 4)
    if world > 1:
        hand_tensor.divide(model, rank, world, "none")
        for block in model.layers.values():
            block.attention.sinks = nn.Parameter(block.attention.sinks.detach().chunk(world)[rank].clone())
    parts = shared.divided_names(model)
    if not args.fault:
        parts |= {name for name, _ in model.named_parameters() if name.endswith("sinks")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = shared.text(args.steps)
    for step in range(args.steps):
        inputs, targets = (value[:, :4] for value in shared.rows_of(data, step, 0, 1))
        loss = shared.cross_entropy(model(inputs), targets)
        loss.backward()
        shared.clip(model, parts.__contains__)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, loss)
    shared.end()


if __name__ == "__main__":
    main()
