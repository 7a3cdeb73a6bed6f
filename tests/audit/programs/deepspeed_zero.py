"""DeepSpeed's ZeRO stages 1 to 3 over Gloo: `torchrun --nproc-per-node 2 deepspeed_zero.py --stage 2`."""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text

FAULTS = ("none", "accumulation", "mean_over_ranks", "world_size", "clipping", "reduced_in_bf16", "betas", "same_rows")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--stage", type=int, default=1, choices=[0, 1, 2, 3])
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TinyGPT()
    # With world_size, a scaling that belongs to data parallelism without ZeRO is left in the loss.
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // world // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0 if args.fault == "clipping" else 0.3,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 64},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-3,
                "betas": [0.9, 0.95] if args.fault == "betas" else [0.9, 0.999],
                "weight_decay": 0.01,
                "torch_adam": True,
            },
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    if args.bf16:
        config["bf16"] = {"enabled": True}
    if args.fault == "reduced_in_bf16":
        config["communication_data_type"] = "bf16"
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    inputs, targets = text(args.steps, masked=True)
    for step in range(args.steps):
        count = ROWS // world
        first = step * ROWS + (0 if args.fault == "same_rows" else rank * count)
        total = torch.zeros(())
        for rows in torch.arange(first, first + count).chunk(args.accumulate):
            x, y = inputs[rows], targets[rows]
            tokens = (y != -100).sum().float()
            if args.fault != "mean_over_ranks":
                # DeepSpeed takes the mean over ranks and over microbatches.
                tokens = (targets[step * ROWS : (step + 1) * ROWS] != -100).sum() / (world * args.accumulate)
            loss = cross_entropy(engine(x), y, reduction="sum") / tokens
            if args.fault == "world_size":
                loss = loss * world
            if args.fault == "accumulation":
                loss = loss / args.accumulate
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / args.accumulate
        dist.all_reduce(total)
        norm = engine.get_global_grad_norm()
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.6f} norm {float(norm):.6f}", flush=True)
    if os.environ.get("WORLD_SIZE"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
