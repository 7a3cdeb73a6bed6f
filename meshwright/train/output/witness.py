"""What one rank saw of one step, small enough to be kept for every rank: on which samples it computed, in how many bits
its layers did, what it drew, what its copies of gradients and weights were. `recording` writes it down.

Tensors are told apart by a digest of their bytes. What all ranks must agree on, they agree on to the last bit wherever
a collective made it; where each computed it by itself, a digest that differs only means: look at the numbers.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.data.batch import Batch
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.weights.layout import gathered, local_of
from meshwright.train.step.batch import samples_in

# A number's mantissa with its leading one; a tensor that the shorter type represents exactly carries no more.
BITS = {
    torch.float8_e4m3fn: 4,
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float32: 24,
    torch.float64: 53,
}


@dataclass(frozen=True)
class Witness:
    """`place`: the coordinate along every axis. `samples`: a digest of each, by microbatch; `counted`: how many of them
    have weight. `gradients` and `state`: digests of the whole tensors as this rank has them. `divided`: the axis that
    a weight's parts lie along, `dims` its dimension that is cut; `tied`: the stages that hold copies of it. `holds`:
    the weights that this rank has parts of, `held`: those in its optimizer. `norm` and `clipped`: of this rank's own
    parts, when the gradients were whole and as the optimizer met them. `bits`: the most that a layer's output
    carried."""

    rank: int
    place: dict[str, int]
    data_rank: int
    device: str
    gradients: dict[str, str]
    state: dict[str, str]
    divided: dict[str, str]
    tied: dict[str, tuple[int, ...]]
    holds: tuple[str, ...]
    held: tuple[str, ...]
    loss: float = 0.0
    samples: tuple[tuple[str, ...], ...] = ()
    counted: tuple[int, ...] = ()
    norm: float = 0.0
    clipped: float = 0.0
    seed: int = 0
    drew: bool = False
    bits: Mapping[str, int] | None = None
    dims: Mapping[str, int] | None = None


# ---- digests


def digest(tensor: Tensor) -> str:
    """Of its shape, type and numbers."""
    found = tensor.detach().cpu().contiguous()
    told = blake2b(f"{tuple(found.shape)} {found.dtype}".encode(), digest_size=8)
    told.update(found.reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def samples_of(batch: Batch) -> tuple[tuple[str, ...], ...]:
    """Of each microbatch, a digest for every sample."""
    return tuple(_rows(part.data) for part in batch.parts)


def _rows(data: Any) -> tuple[str, ...]:
    size = samples_in(data)
    columns: list[list[str]] = []
    for leaf in tree_leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size:
            columns.append([digest(row) for row in leaf])
        else:
            columns.append([digest(leaf) if isinstance(leaf, Tensor) else repr(leaf)] * size)
    return tuple(blake2b(" ".join(row).encode(), digest_size=8).hexdigest() for row in zip(*columns, strict=True))


# ---- precision and randomness


def bits_of(tensor: Tensor) -> int:
    """How many bits of mantissa its numbers carry: those of the shortest type that holds them all. 0: all are zero."""
    if not tensor.is_floating_point() or tensor.dtype not in BITS or not bool(tensor.any()):
        return 0
    for dtype, bits in BITS.items():
        if bits >= BITS[tensor.dtype]:
            break
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return bits
    return BITS[tensor.dtype]


def watch_bits(module: nn.Module, bits: dict[str, int]) -> Callable[[], None]:
    """From now on the most bits that each layer's output carried are noted; what is returned ends it."""

    def watching(name: str) -> Callable[..., None]:
        def note(layer: nn.Module, arguments: Any, output: Any) -> None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return  # a recorded graph is not to be waited for
            # A subclass stands for numbers that may lie on other ranks: asking for them would be an exchange.
            found = [bits_of(leaf.detach()) for leaf in tree_leaves(output) if type(leaf) is Tensor]
            bits[name] = max([bits.get(name, 0), *found])

        return note

    layers = [(name, layer) for name, layer in module.named_modules() if not any(True for _ in layer.children())]
    hooks = [layer.register_forward_hook(watching(name)) for name, layer in layers]

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def drew(device: torch.device) -> bool:
    """Whether a random number was drawn since all generators were given one seed."""
    seed = torch.default_generator.initial_seed()
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    if any(not torch.equal(_fresh(each).get_state(), each.get_state()) for each in generators):
        return True
    if random.getstate() != random.Random(seed).getstate():
        return True
    now, fresh = np.random.get_state(legacy=False), np.random.RandomState(seed % 2**32).get_state(legacy=False)
    return bool(now["state"]["pos"] != fresh["state"]["pos"]) or bool(
        (now["state"]["key"] != fresh["state"]["key"]).any()
    )


def _fresh(generator: torch.Generator) -> torch.Generator:
    return torch.Generator(generator.device).manual_seed(generator.initial_seed())


# ---- copies


def own_copies(
    parallel: ParallelModel, pick: Callable[[nn.Parameter], Tensor | None], names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of tied weights, the copy that this rank's stage holds; all ranks that hold parts of it call this together."""
    held = dict(parallel.module.named_parameters())
    found = {}
    for tie in parallel.tied:
        value = pick(held[tie.local])
        if value is not None and tie.name in names:
            found[tie.name] = gathered(value.detach(), parallel.layouts.get(tie.local), parallel.mesh).to(
                "cpu", copy=True
            )
    return found


def local_norm(module: nn.Module) -> float:
    """Of the gradients in this rank's memory."""
    squares = [local_of(p.grad).double().square().sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
