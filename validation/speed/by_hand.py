"""Training steps written by hand in plain PyTorch, tuned as its documentation advises: autocast, channels_last images,
a fused optimizer, and the model compiled together with its loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from validation.memory.one_gpu import OPTIMIZERS, case_loss, make_model

TrainStep = Callable[[Tensor, Tensor], Tensor]
MODES = {"eager": None, "compiled": "default", "compiled with graphs": "reduce-overhead"}


def train_step(case: dict[str, Any], mode: str | None) -> TrainStep:
    """Returns a function that makes one training step in bf16 and returns its loss. `mode` is the mode of
    `torch.compile`; None for a step that is not compiled."""
    with torch.device("cuda"):
        model = make_model(case)
    if "tokens" not in case["input"]:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = _fused(OPTIMIZERS[case["optimizer"]](model.parameters()), model)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return case_loss(model(inputs), targets)

    forward = loss_of if mode is None else torch.compile(loss_of, mode=mode)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _fused(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    names = ("lr", "momentum", "betas", "eps", "weight_decay")
    options = {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}
    return type(optimizer)(model.parameters(), **options, fused=True)  # type: ignore[call-arg]
