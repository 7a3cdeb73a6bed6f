"""Megatron-LM#7452 (11): a norm over each head has one weight, which all tensor ranks hold. Each rank has the gradient
of its own heads, and the sum over ranks is missing. `torchrun --nproc-per-node 2 head_norm.py --fault`."""

import shared
import torch
import torch.distributed as dist
from shared import hand_tensor
from torch import Tensor, nn
from torch.nn import functional as F


class AttentionWithNorm(shared.Attention):
    """The output of each head is normalized before the heads are put together."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.out_norm = nn.RMSNorm(dim // heads)

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (w(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = self.out_norm(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


def main() -> None:
    args = shared.parse()
    rank, world = shared.start()
    model = shared.TinyGPT()
    for block in model.layers.values():
        block.attention = AttentionWithNorm(32, 4)
    if world > 1:
        hand_tensor.divide(model, rank, world, "none")
    parts = shared.divided_names(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = shared.text(args.steps)
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, 0, 1)
        loss = shared.cross_entropy(model(inputs), targets)
        loss.backward()
        if world > 1 and not args.fault:
            for block in model.layers.values():
                dist.all_reduce(block.attention.out_norm.weight.grad)
        shared.clip(model, parts.__contains__)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, loss)
    shared.end()


if __name__ == "__main__":
    main()
