"""What the scripts of reported faults share: the arguments, the ranks, a training loop's data, and clipping by a norm
over parts that ranks hold."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1]))  # tiny_gpt.py and hand_tensor.py

import hand_tensor
from tiny_gpt import LENGTH, ROWS, Attention, TinyGPT, cross_entropy, text

__all__ = ["LENGTH", "ROWS", "Attention", "TinyGPT", "cross_entropy", "hand_tensor", "text"]


def parse(*options: str) -> argparse.Namespace:
    """`--steps`, `--fault` for the fault as it was reported, and further options without a value."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    for option in ("--fault", *options):
        parser.add_argument(option, action="store_true")
    return parser.parse_args()


def start() -> tuple[int, int]:
    """Returns the rank and the number of ranks; seeds what the model is made of."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    return rank, world


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def summed(value: Tensor) -> Tensor:
    """The sum of a value over the ranks, which gradients do not follow."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def average_gradients(model: nn.Module, factor: float = 1.0) -> None:
    """Averages gradients over the ranks, times a factor."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for parameter in model.parameters():
        if world > 1:
            dist.all_reduce(parameter.grad)
        parameter.grad *= factor / world


def clip(model: nn.Module, is_part: Callable[[str], bool], limit: float = 0.3) -> Tensor:
    """Clips by the norm of all gradients. Of parameters that are no parts each rank has the whole gradient."""
    parts, whole = torch.zeros(()), torch.zeros(())
    for name, parameter in model.named_parameters():
        square = parameter.grad.square().sum()
        if is_part(name):
            parts += square
        else:
            whole += square
    if dist.is_initialized():
        dist.all_reduce(parts)
        # A parameter that is no part counts as the first rank has it.
        dist.broadcast(whole, 0)
    norm = (parts + whole).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def divided_names(model: nn.Module) -> set[str]:
    """The names of weights that `hand_tensor.divide` divided over the ranks."""
    parts = {id(part) for part in hand_tensor.divided(model)}
    return {name for name, value in model.named_parameters() if id(value) in parts}


def report(step: int, loss: Tensor) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)


def rows_of(values: Iterable[Tensor], step: int, rank: int, world: int) -> list[Tensor]:
    """A rank's rows of a step's batch."""
    count = ROWS // world
    first = step * ROWS + rank * count
    return [value[first : first + count] for value in values]


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
