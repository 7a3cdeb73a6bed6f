"""A small model with everything that a step changes, and sessions of copies of it."""

import random
import signal
import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.train.step.optimizer import rebuild_optimizer

EAGER = Plan()
FUSED = Plan.model_validate({"compute": {"fused_optimizer": True}})
COMPILED = Plan.model_validate({"compute": {"compile": "model"}})


class Net(nn.Module):
    """Has dropout and statistics, and counts its calls; not in compiled code, which another number would change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        output: Tensor = self.layers(x)
        return output


class Drawing(Net):
    """Also draws from the generators of Python and NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-6 * (random.random() + float(np.random.rand()))


BATCH = (torch.arange(24.0).reshape(4, 6) / 24, torch.tensor([0, 1, 2, 0]))


def trained(device: str = "cpu", model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model after a step, with gradients, and its optimizer with its state."""
    torch.manual_seed(0)
    model = (model or Net()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, target = (tensor.to(device) for tensor in BATCH)
    nn.functional.cross_entropy(model(inputs), target).backward()
    optimizer.step()
    model.layers[3].eval()  # type: ignore[index, union-attr]
    return model, optimizer


def make_session(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, world: World, **options: Any
) -> Session:
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def make_optimizer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return rebuild_optimizer(optimizer, names, parameters)

    options = {"loss": nn.functional.cross_entropy, **options}
    return Session(deepcopy(model), make_optimizer, plan=plan, world=world, **options)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of all that timing must leave as it is."""
    tensors: list[Any] = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    state = optimizer.state_dict()
    tensors += [value for entry in state["state"].values() for value in entry.values()]
    cudnn = torch.backends.cudnn
    on_gpu = next(model.parameters()).is_cuda
    return [
        [tensor.clone() for tensor in tensors],
        [*map(id, model.parameters()), *map(id, model.modules())],
        str(state["param_groups"]),
        [(module.training, len(module._forward_hooks), "forward" in vars(module)) for module in model.modules()],
        vars(model)["calls"],
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if on_gpu else [],
        [random.getstate(), str(np.random.get_state())],
        [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
        [torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.is_grad_enabled()],
        [*warnings.filters],
        signal.getsignal(signal.SIGALRM),
    ]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
