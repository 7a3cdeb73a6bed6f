"""FSDP2 over one axis of the mesh and tensor parallelism with a divided sequence over the other, 2 x 2 ranks."""

import argparse
import os

import torch
import torch.distributed as dist
from tiny_gpt import ROWS, TinyGPT, cross_entropy, text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

FAULTS = ("none", "tensor_size", "norm_of_own_part", "rows_by_global_rank", "momentum", "row")


def parallelize(model: TinyGPT, mesh: DeviceMesh) -> None:
    outside = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], outside)
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
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tensor"], inside)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def clip(model: TinyGPT, fault: str) -> torch.Tensor:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if fault == "norm_of_own_part":
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    is_distributed = "RANK" in os.environ
    torch.manual_seed(0)
    model = TinyGPT()
    rank = data_rank = 0
    data = 1
    if is_distributed:
        dist.init_process_group("gloo")
        rank, data = dist.get_rank(), dist.get_world_size() // args.tensor
        mesh = init_device_mesh("cpu", (data, args.tensor), mesh_dim_names=("data", "tensor"))
        data_rank = mesh.get_local_rank("data")
        parallelize(model, mesh)
    momentum = 0.8 if args.fault == "momentum" else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)

    inputs, targets = text(args.steps, masked=True)
    for step in range(args.steps):
        count = ROWS // data
        first = step * ROWS + data_rank * count
        if args.fault == "rows_by_global_rank":
            first = step * ROWS + (rank * count) % ROWS
        x, y = inputs[first : first + count], targets[first : first + count]
        tokens = (targets[step * ROWS : (step + 1) * ROWS] != -100).sum()
        ranks = data * args.tensor if args.fault == "tensor_size" else data
        loss = cross_entropy(model(x), y, reduction="sum") / tokens * ranks
        loss.backward()
        if args.fault == "row" and rank == 1:
            model.output.weight.grad.to_local()[2] *= 1.01
        norm = clip(model, args.fault)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if is_distributed:
            dist.all_reduce(loss, group=mesh["data"].get_group())
        if rank == 0:
            print(f"step {step} loss {loss.item() / data:.6f} norm {norm.item():.6f}", flush=True)
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
