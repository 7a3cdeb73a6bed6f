"""A model run by several threads of one process: what PyTorch's DataParallel does with GPUs, for CPU cores too.

Each thread runs a part of the batch through a copy of the module that shares its parameters, forward and backward. The
outputs are joined in between, so that any loss is computed over the whole batch, and its gradient is that of the plain
model. No plan chooses this: it is there to be compared with.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.errors import InputError


def by_threads(model: nn.Module, count: int, kind: str) -> nn.Module:
    """On CPUs `nn.DataParallel` would run the whole batch in one thread."""
    return nn.DataParallel(model, list(range(count))) if kind == "cuda" else Threads(model, count)


class Threads(nn.Module):
    """Batches are split along their first dimension. The first thread runs `module` itself, whose buffers are handed to
    the others before each forward pass; what those make of theirs is lost, as with `nn.DataParallel`. No gradient goes
    back into the batch."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        shared = {id(parameter): parameter for parameter in module.parameters()}
        self._copies = [module, *(deepcopy(module, dict(shared)) for _ in range(count - 1))]
        self._pool = ThreadPoolExecutor(count)

    def train(self, mode: bool = True) -> "Threads":
        super().train(mode)
        for copy in self._copies:
            copy.train(mode)
        return self

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        parts = _parts((arguments, keywords), len(self._copies))
        for copy in self._copies[1 : len(parts)]:
            _hand_buffers(self.module, copy)
        grad = torch.is_grad_enabled()  # threads have a mode of their own

        def run(copy: nn.Module, part: Any) -> Any:
            with torch.set_grad_enabled(grad):
                return copy(*part[0], **part[1])

        outputs = [tree_flatten(output) for output in self._pool.map(run, self._copies, parts)]
        (first, structure), tensors = outputs[0], [_tensors(leaves) for leaves, _ in outputs]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        joined = iter(_Join.apply(self._pool, tensors, *trained))
        return tree_unflatten([next(joined) if isinstance(leaf, Tensor) else leaf for leaf in first], structure)


def _hand_buffers(module: nn.Module, copy: nn.Module) -> None:
    """As new tensors: the old ones may be wanted by a backward pass that is still to come."""
    for source, target in zip(module.modules(), copy.modules(), strict=True):
        for name, buffer in source.named_buffers(recurse=False, remove_duplicate=False):
            setattr(target, name, buffer.clone())


def _parts(batch: Any, count: int) -> list[Any]:
    """As even as they can be; fewer than `count` where there are not as many samples."""
    leaves, structure = tree_flatten(batch)
    samples = next((len(leaf) for leaf in leaves if _is_divided(leaf)), 1)
    count = max(1, min(count, samples))
    divided = [leaf.tensor_split(count) if _is_divided(leaf) else [leaf] * count for leaf in leaves]
    return [tree_unflatten(list(part), structure) for part in zip(*divided, strict=True)]


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not found or not all(map(_is_divided, found)):
        told = "a number" if found else f"{type(leaves[0]).__name__}, which holds no tensor" if leaves else "nothing"
        raise InputError(f"the model returns {told}: threads join tensors with a row for each sample")
    return found


class _Join(torch.autograd.Function):
    """Parts of outputs, one after another. Backward each thread finds the gradients of its part, which are then added
    in the order of the parts: PyTorch does not promise that threads may accumulate into the same parameters."""

    @staticmethod
    def forward(ctx: Any, pool: ThreadPoolExecutor, parts: list[list[Tensor]], *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.pool, ctx.parts, ctx.trained = pool, parts, trained
        ctx.set_materialize_grads(False)
        joined = tuple(torch.cat(same) for same in zip(*parts, strict=True))
        ctx.mark_non_differentiable(
            *(whole for whole, one in zip(joined, parts[0], strict=True) if not one.requires_grad)
        )
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        parts, trained = ctx.parts, ctx.trained
        del ctx.parts
        used = [place for place, gradient in enumerate(gradients) if gradient is not None]
        starts = [
            gradient.split([len(part[place]) for part in parts])
            for place, gradient in enumerate(gradients)
            if gradient is not None
        ]

        def found(part: list[Tensor], start: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad([part[place] for place in used], trained, start, allow_unused=True)

        each = ctx.pool.map(found, parts, zip(*starts, strict=True))
        return (None, None, *(_sum(same) for same in zip(*each, strict=True)))


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    found = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, found) if found else None
