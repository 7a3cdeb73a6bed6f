"""The strategy `DataParallel` of the strategies benchmark: threads of one process share each batch. On GPUs this is
PyTorch's `nn.DataParallel`, on CPUs a module that does the same. No plan trains this way; the strategy exists for
comparison.

Each thread runs a part of the batch, forward and backward, through a copy of the module that shares the module's
parameters. The outputs are joined before the loss is computed. Therefore any loss sees the whole batch, and the
gradients are those of the plain model.
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


def data_parallel(model: nn.Module, threads: int, device: str) -> nn.Module:
    """Returns a module that runs the model in `threads` threads. On CPUs it is a `ThreadedModule`, because
    `nn.DataParallel` would run the whole batch in one thread there."""
    return nn.DataParallel(model, list(range(threads))) if device == "cuda" else ThreadedModule(model, threads)


class ThreadedModule(nn.Module):
    """Runs a module in several threads, each on a part of the batch (split along dimension 0), and joins the outputs.
    The first thread runs `module` itself, and the other threads run copies that share its parameters. The buffers of
    `module` are copied to the copies before each forward pass; what a copy writes into its buffers is lost, as with
    `nn.DataParallel`. The batch itself gets no gradient."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        shared = {id(parameter): parameter for parameter in module.parameters()}
        self._copies = [module, *(deepcopy(module, dict(shared)) for _ in range(count - 1))]
        self._pool = ThreadPoolExecutor(count)

    def train(self, mode: bool = True) -> "ThreadedModule":
        super().train(mode)
        for copy in self._copies:
            copy.train(mode)
        return self

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        parts = _parts((arguments, keywords), len(self._copies))
        for copy in self._copies[1 : len(parts)]:
            _copy_buffers(self.module, copy)
        grad = torch.is_grad_enabled()  # each thread has its own mode

        def run(copy: nn.Module, part: Any) -> Any:
            with torch.set_grad_enabled(grad):
                return copy(*part[0], **part[1])

        outputs = [tree_flatten(output) for output in self._pool.map(run, self._copies, parts)]
        (first, structure), tensors = outputs[0], [_tensors(leaves) for leaves, _ in outputs]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        joined = iter(_Join.apply(self._pool, tensors, *trained))
        return tree_unflatten([next(joined) if isinstance(leaf, Tensor) else leaf for leaf in first], structure)


def _copy_buffers(module: nn.Module, copy: nn.Module) -> None:
    """Gives `copy` new tensors with the values of the module's buffers. The old tensors are not overwritten, because a
    later backward pass may need them."""
    for source, target in zip(module.modules(), copy.modules(), strict=True):
        for name, buffer in source.named_buffers(recurse=False, remove_duplicate=False):
            setattr(target, name, buffer.clone())


def _parts(batch: Any, count: int) -> list[Any]:
    """Returns the batch as a list of `count` parts of nearly equal size, or of fewer parts if there are fewer
    samples."""
    leaves, structure = tree_flatten(batch)
    samples = next((len(leaf) for leaf in leaves if _is_divided(leaf)), 1)
    count = max(1, min(count, samples))
    divided = [leaf.tensor_split(count) if _is_divided(leaf) else [leaf] * count for leaf in leaves]
    return [tree_unflatten(list(part), structure) for part in zip(*divided, strict=True)]


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(map(_is_divided, tensors)):
        output = (
            "a number" if tensors else f"{type(leaves[0]).__name__}, which holds no tensor" if leaves else "nothing"
        )
        raise InputError(f"the model returns {output}: threads join tensors with a row for each sample")
    return tensors


class _Join(torch.autograd.Function):
    """Concatenates the outputs of the threads. In the backward pass, each thread computes the gradients of its part.
    The gradients of all parts are then added in the order of the parts by one thread, because PyTorch does not promise
    that several threads may accumulate into the same parameters."""

    @staticmethod
    def forward(ctx: Any, pool: ThreadPoolExecutor, parts: list[list[Tensor]], *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.pool, ctx.parts, ctx.trained = pool, parts, trained
        ctx.set_materialize_grads(False)
        joined = tuple(torch.cat(same) for same in zip(*parts, strict=True))
        ctx.mark_non_differentiable(
            *(whole for whole, part in zip(joined, parts[0], strict=True) if not part.requires_grad)
        )
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        parts, trained = ctx.parts, ctx.trained
        del ctx.parts
        used = [index for index, gradient in enumerate(gradients) if gradient is not None]
        output_gradients = [
            gradient.split([len(part[index]) for part in parts])
            for index, gradient in enumerate(gradients)
            if gradient is not None
        ]

        def backward_part(part: list[Tensor], gradient: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad([part[index] for index in used], trained, gradient, allow_unused=True)

        part_gradients = ctx.pool.map(backward_part, parts, zip(*output_gradients, strict=True))
        return (None, None, *(_sum(same) for same in zip(*part_gradients, strict=True)))


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, present) if present else None
