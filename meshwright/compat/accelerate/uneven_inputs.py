"""`join_uneven_inputs` for ranks that have different numbers of batches. Ranks whose batches are used up take part in
the averages of gradients with zeros, until no rank has a batch left. Then all ranks get the weights, the optimizer's
state and the schedules of a rank that had the most batches.

As with DDP, the divisor of an average stays the number of all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from meshwright.messages.exchange import all_gather_values, broadcast_value
from meshwright.parallel.replicate.gradient_averaging import GradientAverager


class JoinedModel(Joinable):
    """The model of a `Join` context. `notify` is called before each average of gradients."""

    def __init__(
        self,
        module: nn.Module,
        averager: GradientAverager,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Any],
    ) -> None:
        super().__init__()
        self.module = module
        self.averager = averager
        self.optimizers = optimizers
        self.schedules = schedules
        self._device = device

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD

    def join_hook(self, **keywords: Any) -> JoinHook:
        return _TakePart(self)

    def notify(self) -> None:
        """Tells ranks without batches that an average of gradients begins."""
        Join.notify_join_context(self)


class _TakePart(JoinHook):
    """What ranks do whose batches are used up."""

    def __init__(self, joined: JoinedModel) -> None:
        self._joined = joined

    def main_hook(self) -> None:
        for parameter in self._joined.module.parameters():
            parameter.grad = None
        self._joined.averager.finish()

    def post_hook(self, is_last_joiner: bool) -> None:
        joined = self._joined
        # Of all ranks that had the most batches, the first.
        source = all_gather_values(is_last_joiner).index(True)
        with torch.no_grad():
            for tensor in (*joined.module.parameters(), *joined.module.buffers()):
                dist.broadcast(tensor.detach(), source)
        for parameter in joined.module.parameters():
            parameter.grad = None
        for optimizer in joined.optimizers:
            _copy_state(optimizer, source)
        for schedule in joined.schedules:
            schedule.load_state_dict(broadcast_value(schedule.state_dict(), source=source))


def _copy_state(optimizer: torch.optim.Optimizer, source: int) -> None:
    """Gives an optimizer the state and the options of the same optimizer on the rank `source`."""
    tensors: list[Tensor] = []
    if dist.get_rank() == source:
        broadcast_value(_replace_tensors(optimizer.state_dict(), tensors), source=source)
        for tensor in tensors:
            dist.broadcast(tensor, source)
        return
    state = _insert_tensors(broadcast_value(None, source=source), tensors)
    for tensor in tensors:
        dist.broadcast(tensor, source)
    optimizer.load_state_dict(state)


def _replace_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """The value with descriptions in the place of tensors, which are appended to `tensors` in the same order."""
    if isinstance(value, Tensor):
        tensors.append(value.contiguous())
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": {"shape": list(value.shape), "dtype": dtype, "device": value.device.type}}
    if isinstance(value, dict):
        return {key: _replace_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace_tensors(item, tensors) for item in value)
    return value


def _insert_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """The inverse of `_replace_tensors`, with new tensors of any content, which are appended to `tensors`."""
    if isinstance(value, dict) and set(value) == {"tensor"}:
        tensors.append(_empty(**value["tensor"]))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _insert_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_insert_tensors(item, tensors) for item in value)
    return value


def _empty(shape: list[int], dtype: str, device: str) -> Tensor:
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    return torch.empty(shape, dtype=getattr(torch, dtype), device=place)
