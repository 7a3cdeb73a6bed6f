"""torchtune#2420: torch cannot clip plain tensors and DTensors of a tensor mesh together; with the parts that ranks
hold it can, and each rank clips by the norm of its own. `torchrun --nproc-per-node 2 clipped_parts.py --fault`."""

import shared
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {
    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel(),
    **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
    "feed_forward.w2": RowwiseParallel(),
}


def clip(model: nn.Module, fault: bool) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    divided = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    if fault:
        norm = nn.utils.get_total_norm([*whole, *(gradient.to_local() for gradient in divided)])
    else:
        norms = [nn.utils.get_total_norm(group) for group in (whole, divided) if group]
        norms = [value.full_tensor() if isinstance(value, DTensor) else value for value in norms]
        norm = torch.stack(norms).norm()
    for group in (whole, divided):
        for gradient in group:
            gradient.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))


def main() -> None:
    args = shared.parse()
    _, world = shared.start()
    model = shared.TinyGPT()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.layers.values():
            parallelize_module(block, mesh, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    data = shared.text(args.steps)
    for step in range(args.steps):
        inputs, targets = shared.rows_of(data, step, 0, 1)
        loss = shared.cross_entropy(model(inputs), targets)
        loss.backward()
        clip(model, args.fault)
        optimizer.step()
        optimizer.zero_grad()
        shared.report(step, loss)
    shared.end()


if __name__ == "__main__":
    main()
