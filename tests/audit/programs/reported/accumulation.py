"""transformers' Trainer before 4.46: under accumulation, the loss is the mean of the means of micro-batches, which have
different numbers of tokens. `python accumulation.py --accumulate --fault` against `python accumulation.py`."""

import shared
import torch

MICROBATCHES = 4


def main() -> None:
    args = shared.parse("--accumulate")
    shared.start()
    model = shared.TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = shared.text(args.steps, masked=True)
    parts = MICROBATCHES if args.accumulate else 1
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, 0, 1)
        tokens = (targets != -100).sum()
        for part, goal in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            logits = model(part)
            if args.fault:
                loss = shared.cross_entropy(logits, goal) / parts
            else:
                loss = shared.sum_of_losses(logits, goal) / tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, loss)


if __name__ == "__main__":
    main()
