"""Megatron-LM#7452 (3): the loss of a second predicted token is weighted by each rank's own numbers of tokens, and the
whole by all ranks' tokens. `torchrun --nproc-per-node 2 multi_token_loss.py --fault`."""

import shared
import torch
from shared import TinyGPT
from torch import Tensor, nn


class TwoTokens(nn.Module):
    """Predicts the next token, and from one more layer the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT()
        self.output, self.gpt.output = self.gpt.output, None
        self.ahead = nn.Linear(32, 32, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.gpt(tokens)
        return self.output(hidden), self.output(hidden + torch.tanh(self.ahead(hidden)))


def next_targets(targets: Tensor) -> Tensor:
    """The targets of the second token: one place further, and none at the end."""
    return torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], -100)], dim=1)


def count(targets: Tensor) -> Tensor:
    return (targets != -100).sum().float()


def main() -> None:
    args = shared.parse()
    rank, world = shared.start()
    model = TwoTokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = shared.text(args.steps)
    for rows in targets.chunk(2 * args.steps)[::2]:  # the first half of each batch has short answers
        rows[:, :-2] = -100
    data = (inputs, targets)
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, rank, world)
        later = next_targets(targets)
        first, second = model(inputs)
        own, own_later = count(targets), count(later)
        tokens, tokens_later = shared.summed(own), shared.summed(own_later)
        weight = own / own_later if args.fault else tokens / tokens_later
        loss = shared.sum_of_losses(first, targets) + 0.5 * weight * shared.sum_of_losses(second, later)
        (loss * world / tokens).backward()
        shared.average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, shared.summed(loss) / tokens)
    shared.end()


if __name__ == "__main__":
    main()
