"""Training loops of Accelerate, which tests run with its own `Accelerator` and with that of Meshwright."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright.compat.accelerate import Accelerator

MakeAccelerator = Callable[..., Any]


@contextmanager
def accelerate_process(rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Lets Accelerate find the ranks of a test's pool, or one process, as if torchrun had started them."""
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    if world_size > 1:
        variables |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        variables |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": "1"}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def samples(count: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def train(
    accelerator: Any, batch: int, steps: int = 12, shuffle: bool = False, clip: float | None = 0.5
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains the network. Returns the mean over the ranks of each loss, and the final weights."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    loader: Any = DataLoader(samples(), batch_size=batch, shuffle=shuffle)
    optimizer, loader, model, schedule = accelerator.prepare(optimizer, loader, model, schedule)
    losses: list[float] = []
    while len(losses) < steps:
        for inputs, target in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if len(losses) == steps:
                break
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def train_on(rank: int, world_size: int, make: MakeAccelerator, options: dict[str, Any], *args: Any) -> Any:
    with accelerate_process(rank, world_size):
        return train(make(**options), *args)


def train_alone(options: dict[str, Any], *args: Any) -> Any:
    return train_on(0, 1, Accelerator, options, *args)
