"""Accelerate with FSDP2 and accumulated gradients; its scheduler must not be stepped once for each process."""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text
from torch.utils.data import DataLoader, TensorDataset

FAULTS = (
    "none",
    "scheduler",
    "divided_twice",
    "mean_over_ranks",
    "norm_before_accumulation",
    "shuffled",
    "weight_decay",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=args.mixed_precision,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=args.accumulate,
        step_scheduler_with_optimizer=args.fault == "scheduler",
    )
    set_seed(0)
    model = TinyGPT()
    decay = 0.0 if args.fault == "weight_decay" else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    rows_of_a_process = ROWS // args.accumulate // accelerator.num_processes
    data = DataLoader(
        TensorDataset(*text(args.steps, masked=True)),
        batch_size=rows_of_a_process,
        shuffle=args.fault == "shuffled",
    )
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    step, total = 0, torch.zeros(())
    for x, y in data:
        with accelerator.accumulate(model):
            tokens = (y != -100).sum().float()
            if args.fault != "mean_over_ranks":
                tokens = accelerator.reduce(tokens, reduction="mean")
            loss = cross_entropy(model(x), y, reduction="sum") / tokens
            accelerator.backward(loss / args.accumulate if args.fault == "divided_twice" else loss)
            total += accelerator.reduce(loss.detach(), reduction="mean") / args.accumulate
            if accelerator.sync_gradients or args.fault == "norm_before_accumulation":
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(f"step {step} loss {total.item():.6f} norm {float(norm):.6f}", flush=True)
            step, total = step + 1, torch.zeros(())
    accelerator.end_training()


if __name__ == "__main__":
    main()
