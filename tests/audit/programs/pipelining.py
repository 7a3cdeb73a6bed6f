"""Two stages of torch.distributed.pipelining and four microbatches; the embedding and the output have tied weights."""

import argparse
import os

import torch
import torch.distributed as dist
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICROBATCHES = 4
FAULTS = ("none", "microbatches", "tied_not_summed", "norm_of_own_stage", "learning_rate", "same_microbatch", "row")


def cut(model: TinyGPT, rank: int) -> None:
    """Leaves this stage's half of the layers in the model."""
    if rank == 0:
        del model.layers["1"]
        model.norm = model.output = None
    else:
        del model.layers["0"]
        model.tok_embeddings = model.positions = None


def tied_weight(model: TinyGPT) -> nn.Parameter:
    return model.output.weight if model.tok_embeddings is None else model.tok_embeddings.weight


def clip(model: TinyGPT, rank: int, fault: str) -> torch.Tensor:
    tied = tied_weight(model)
    # Both stages have the tied weight's gradient, which counts once.
    counted = [p for p in model.parameters() if rank == 0 or p is not tied]
    square = torch.stack([p.grad.square().sum() for p in counted]).sum()
    if fault != "norm_of_own_stage":
        dist.all_reduce(square)
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = TinyGPT()
    torch.nn.init.normal_(model.tok_embeddings.weight, std=0.1)
    model.output.weight = model.tok_embeddings.weight
    inputs, targets = text(args.steps)
    if "RANK" not in os.environ:
        train_in_one_process(model, inputs, targets, args.steps)
        return

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cut(model, rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy, scale_grads=args.fault != "microbatches")
    rate = 1e-4 if args.fault == "learning_rate" and rank == 1 else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(args.steps):
        rows = torch.arange(step * ROWS, (step + 1) * ROWS)
        if args.fault == "same_microbatch":
            rows = rows[: ROWS // MICROBATCHES].repeat(MICROBATCHES)
        if rank == 0:
            schedule.step(inputs[rows])
            loss = torch.zeros(())
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets[rows], losses=losses)
            loss = torch.stack([part.detach() for part in losses]).mean()
        if args.fault != "tied_not_summed":
            dist.all_reduce(tied_weight(model).grad)
        if args.fault == "row" and rank == 1:
            model.layers["1"].feed_forward.w2.weight.grad[9] *= 1.01
        norm = clip(model, rank, args.fault)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)
    dist.destroy_process_group()


def train_in_one_process(model: TinyGPT, inputs: torch.Tensor, targets: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        loss = cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
