"""Finds NaN and infinite numbers: in the loss and the gradients of a step, whose update is then left out, and in the
weights and the optimizer's state, which are then not saved. Updates are left out after a spike of the loss, too."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.chunks import local_value
from meshwright.parallel.clip import group_by_dtype_and_device
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.weights.layout import local_tensor
from meshwright.train.loss.spikes import SpikeDetector
from meshwright.train.torch_private import foreach_norm

NO_PROBLEM: tuple[str | None, str | None] = (None, None)  # what `StepCheck.examine` returns for most steps
_HALF = (torch.float16, torch.bfloat16)


class StepCheck:
    """Finds out, on all ranks together, whether the update of a step has to be left out because its loss or a gradient
    is not finite, or its loss is a spike. Keeps copies of the model's buffers, because the forward pass of such a step
    may have made running statistics NaN."""

    def __init__(
        self,
        parallel: ParallelModel,
        ranks: int,
        *,
        loss: bool,
        gradients: bool,
        spikes: SpikeDetector | None,
    ) -> None:
        """`loss` and `gradients` say what has to be finite. If `spikes` is None, no loss is a spike."""
        self._parallel = parallel
        self._ranks = ranks
        self._loss = loss
        self._gradients = gradients
        self._spikes = spikes
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Copies the model's buffers. Call it before each step."""
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._parallel.module.named_buffers()}

    def examine(self, loss: Tensor) -> tuple[str | None, str | None]:
        """Returns what is not finite in the step, such as `the loss is nan`, and why its loss is a spike; None for what
        is not so. The answer is the same on all ranks. If there is a problem, the model's buffers get their values of
        before the step. Call it between the backward pass and the optimizer's step. It waits for the device."""
        value = float(loss)
        nonfinite = self._find_nonfinite(value)
        spike = self._spikes.examine(value) if self._spikes and nonfinite is None else None
        if (nonfinite or spike) is not None:
            self._restore_buffers()
            self._parallel.reset_compression()
        return nonfinite, spike

    def about(self) -> dict[str, Any]:
        """What a checkpoint's manifest says so that a resumed run decides as this one would."""
        return {"losses": self._spikes.losses} if self._spikes else {}

    def restore(self, about: Mapping[str, Any]) -> None:
        if self._spikes:
            self._spikes.restore(about.get("losses", ()))

    def _find_nonfinite(self, loss: float) -> str | None:
        if self._loss and not math.isfinite(loss):  # the loss is the same on all ranks
            return f"the loss is {loss}"
        if not self._gradients:
            return None
        gradients = (p.grad for p in self._parallel.module.parameters() if p.grad is not None)
        is_nonfinite = on_any_rank(has_nonfinite(map(_numbers, gradients)), self._ranks)
        return "a gradient is not finite" if is_nonfinite else None

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for name, buffer in self._parallel.module.named_buffers():
            copy = self._buffers.get(name)
            if copy is not None and copy.shape == buffer.shape:
                buffer.copy_(copy)


def make_step_check(
    parallel: ParallelModel, ranks: int, skips: bool, is_fp16: bool, spikes: SpikeDetector | None
) -> StepCheck | None:
    """Returns the check of a session; None if it looks for nothing. `skips`: updates that are not finite are left
    out."""
    if not skips and spikes is None:
        return None
    # In fp16, a gradient that is not finite only means that the loss scale is too large, and it reacts to that.
    return StepCheck(parallel, ranks, loss=skips, gradients=skips and not is_fp16, spikes=spikes)


def on_any_rank(flag: bool, ranks: int) -> bool:
    """Whether the flag is True on any rank. All ranks call this together."""
    if ranks == 1:
        return flag
    largest = torch.tensor(int(flag))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return bool(largest)


def has_nonfinite(tensors: Iterable[Tensor]) -> bool:
    """Whether any number in these dense floating-point tensors is NaN or infinite."""
    for group in group_by_dtype_and_device(tensors):
        # The norms read every number once and need few kernels. A norm may be infinite though all numbers are finite,
        # because it overflowed; so only tensors with such a norm are looked at number by number.
        norms = torch.stack(foreach_norm(group, 2.0, dtype=torch.float32 if group[0].dtype in _HALF else None))
        suspects = [tensor for tensor, ok in zip(group, norms.isfinite().tolist(), strict=True) if not ok]
        if any(not bool(tensor.isfinite().all()) for tensor in suspects):
            return True
    return False


def nonfinite_keys(state: Mapping[str, Any], without: Collection[str] = ()) -> list[str]:
    """Returns the keys of a checkpoint's tensors in which this rank has a number that is NaN or infinite. Keys in
    `without` are not looked at."""
    tensors = {key: _floating_point(value) for key, value in state.items() if key not in without}
    present = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    if not has_nonfinite(present.values()):  # one pass over all tensors; their names are only needed if it fails
        return []
    return [key for key, tensor in present.items() if has_nonfinite([tensor])]


def infinite_keys(state: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a checkpoint's tensors in which this rank has infinite numbers and no NaN."""
    tensors = {key: _floating_point(state[key]) for key in nonfinite_keys(state)}
    return [key for key, tensor in tensors.items() if tensor is not None and not bool(tensor.isnan().any())]


def _floating_point(value: Any) -> Tensor | None:
    """This rank's part of an entry of a checkpoint; None if the entry is not a tensor of floating-point numbers."""
    tensor = local_value(value)
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return _numbers(tensor.detach())


def _numbers(tensor: Tensor) -> Tensor:
    """The numbers that this rank holds of a tensor, as a dense tensor: those of a sparse tensor's rows that exist.
    Tensors of 8-bit numbers become fp32, because torch computes no norm of them."""
    local = local_tensor(tensor)
    dense = local.coalesce().values() if local.is_sparse else local
    return dense.float() if dense.dtype.itemsize == 1 else dense
