"""Tensor parallelism with a divided sequence by `parallelize_module`; positions are looked up on each rank's part."""

import argparse
import os

import torch
import torch.distributed as dist
from tiny_gpt import LENGTH, ROWS, TinyGPT, cross_entropy, text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

FAULTS = ("none", "norm_not_summed", "positions", "positions_not_summed", "reduced_twice", "tensor_size", "row")


def parallelize(model: TinyGPT, mesh: DeviceMesh, fault: str) -> None:
    outside = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outside)
    inside = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    if fault == "norm_not_summed":
        del inside["ffn_norm"]  # runs on each rank's part of the sequence all the same
    for layer in model.layers.values():
        parallelize_module(layer, mesh, inside)


def clip(model: TinyGPT, maximum: float) -> torch.Tensor:
    squares = torch.zeros(())
    for parameter in model.parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        squares += whole.square().sum()
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), maximum, norm, foreach=False)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    is_distributed = "RANK" in os.environ
    torch.manual_seed(0)
    model = TinyGPT()
    rank, world = 0, 1
    if is_distributed:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        parallelize(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)), args.fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    part = LENGTH // world
    start = 0 if args.fault == "positions" else rank * part
    positions = torch.arange(start, start + part)
    inputs, targets = text(args.steps)
    for step in range(args.steps):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        loss = cross_entropy(model(inputs[rows], positions), targets[rows])
        if args.fault == "tensor_size":
            loss = loss * world  # as for ranks of data parallelism, whose mean is taken
        loss.backward()
        if is_distributed and args.fault != "positions_not_summed":
            dist.all_reduce(model.positions.weight.grad)
        if is_distributed and args.fault == "reduced_twice":
            for name, parameter in model.named_parameters():
                if "norm" in name and isinstance(parameter.grad, DTensor):
                    whole = parameter.grad.full_tensor()
                    dist.all_reduce(whole)
                    parameter.grad.to_local().copy_(whole)
        if args.fault == "row" and rank == 0:
            model.tok_embeddings.weight.grad.to_local()[7] *= 1.01
        norm = clip(model, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
