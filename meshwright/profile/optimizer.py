"""What an optimizer needs beside weights and gradients: its state, and what its step takes for a moment.

Found by running two steps of the optimizer itself on a few small tensors and watching its memory, so any optimizer
is known, and both its ways: all parameters at once (`foreach`, what torch does on GPUs) or one after another.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.profile.tracing.record import OperatorSeen, Recorder
from meshwright.profile.values import ITEM_BYTES

_ELEMENTS = 4096
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes per byte of (fp32) parameters; `at_once` says whether the temporaries are of all parameters together
    or of the largest one. Of a step that takes one parameter after another, the operators that each needs, and what
    they move; 0 where nobody counted. `waits`: the host starts them only when the device has done all before, as
    where it has looked at a gradient, and does not run ahead."""

    state: float
    temporary: float
    at_once: bool
    operators: float = 0.0
    moved: float = 0.0
    waits: bool = True


def optimizer_cost(make: MakeOptimizer, at_once: bool) -> OptimizerCost:
    """`make` builds the optimizer on given parameters; `at_once` asks for its multi-tensor way where it has one."""
    parameters = [nn.Parameter(torch.zeros(_ELEMENTS)) for _ in range(2)]
    optimizer = make(parameters)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if "foreach" in group and not fused:
            group["foreach"] = at_once
    at_once = at_once and any("foreach" in group for group in optimizer.param_groups)
    _step(optimizer, parameters)
    state = [value for entry in optimizer.state.values() for value in entry.values() if _is_large(value)]
    recorder = Recorder({}, frozenset())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    recorder.know([parameters, [p.grad for p in parameters], list(optimizer.state.values())])
    with recorder, torch.no_grad():
        optimizer.step()
    now = peak = 0
    for event in recorder.recording.memory:
        now += event.bytes if abs(event.bytes) >= _ELEMENTS else 0  # step counts and the like do not grow
        peak = max(peak, now)
    own = sum(p.numel() * p.element_size() for p in parameters)
    reference = own if at_once else own / len(parameters)
    seen = [o for o in recorder.recording.operators if not o.name.startswith("_record_function")]  # a profiler's
    return OptimizerCost(
        state=sum(v.numel() * v.element_size() for v in state) / own,
        temporary=peak / reference,
        at_once=at_once,
        operators=0.0 if at_once else len(seen) / len(parameters),
        moved=0.0 if at_once else sum(map(_moved, seen)) / own,
    )


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _moved(operator: OperatorSeen) -> int:
    """What is changed in place is read and written. Step counts and the like do not grow."""
    again = operator.shape[0] * ITEM_BYTES.get(operator.dtype, 4) if operator.name.endswith("_") else 0
    return operator.bytes + again if operator.bytes >= _ELEMENTS else 0


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() >= _ELEMENTS


def cost_of(template: torch.optim.Optimizer | None, on_gpu: bool) -> OptimizerCost:
    if template is None:
        return OptimizerCost(state=0.0, temporary=0.0, at_once=False)
    kind = type(template)
    known = inspect.signature(kind).parameters
    options = {k: v for k, v in template.param_groups[0].items() if k in known and k != "params"}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, **options)

    return optimizer_cost(make, at_once=on_gpu and options.get("foreach") is not False)
