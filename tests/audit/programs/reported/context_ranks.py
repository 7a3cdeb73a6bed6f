"""Megatron-LM#7452 (9): each context rank has a part of each sequence and divides its loss by the valid targets of its
own part, and gradients are averaged over ranks. `torchrun --nproc-per-node 2 context_ranks.py --fault`."""

from itertools import pairwise

import shared
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


class ContextAttention(shared.Attention):
    """A rank's queries look at the keys of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (w(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)
        places = dist.get_rank() * length + torch.arange(length)
        sees = places[:, None] >= torch.arange(k.shape[2])[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


def main() -> None:
    args = shared.parse()
    rank, world = shared.start()
    model = shared.TinyGPT()
    if world > 1:
        for block in model.layers.values():
            attention = ContextAttention(32, 4)
            attention.load_state_dict(block.attention.state_dict())
            block.attention = attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bounds = [part * shared.LENGTH // world for part in range(world + 1)]
    first, last = list(pairwise(bounds))[rank]
    data = shared.text(args.steps, masked=True)
    for step in range(args.steps):
        inputs, targets = (value[:, first:last] for value in shared.rows_of(data, step, 0, 1))
        loss = shared.sum_of_losses(model(inputs, torch.arange(first, last)), targets)
        own = (targets != -100).sum()
        (loss / own if args.fault else loss * world / shared.summed(own)).backward()
        shared.average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, shared.summed(loss) / shared.summed(own))
    shared.end()


if __name__ == "__main__":
    main()
