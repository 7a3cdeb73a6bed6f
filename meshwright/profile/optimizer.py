"""What an optimizer costs in addition to weights and gradients: its state, the temporary memory of its step, and the
operators that the step runs.

All of it is measured by running two steps of the optimizer on small tensors and recording the second one, so any
optimizer works. Both implementations of torch are covered: multi-tensor (`foreach`, the default on GPUs), which updates
all parameters in one go, and single-tensor, which updates one parameter after another.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.dtypes import ITEM_BYTES
from meshwright.errors import InputError
from meshwright.profile.tracing.recorder import RecordedOperator, TraceRecorder

_ELEMENTS = 4096  # elements of each test parameter; smaller tensors are step counts and the like, of constant size
# Optimizers that update every element from that element, its gradient and its own state alone.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerCost:
    """The cost of one optimizer step. Ratios are bytes per byte of fp32 parameters.

    If `multi_tensor` is True, `temporary_ratio` is relative to the bytes of all parameters; otherwise it is relative to
    the bytes of the largest parameter. `operators_per_parameter` and `traffic_ratio` (bytes read and written) describe
    a single-tensor step; they are 0 if that was not measured. If `waits_for_device` is True, the host reads the value
    of a gradient before the step. It therefore launches the operators of the step only after the device has finished
    all earlier work. Otherwise it launches them ahead of time. `has_fused` says whether torch has a fused
    implementation, `is_fused` whether the cost is that of the fused step, which goes over all tensors once.
    `elementwise`: some rows of a parameter can be updated as if they were the whole (`is_elementwise`).
    `state_numbers`: tensors of a few numbers, such as the number of steps, in the state of each parameter.
    """

    state_ratio: float
    temporary_ratio: float
    multi_tensor: bool
    operators_per_parameter: float = 0.0
    traffic_ratio: float = 0.0
    waits_for_device: bool = True
    has_fused: bool = False
    is_fused: bool = False
    elementwise: bool = True
    state_numbers: float = 0.0

    def fused(self) -> "OptimizerCost":
        """The cost of the fused step; the same cost if there is none."""
        if not self.has_fused:
            return self
        return replace(
            self, temporary_ratio=0.0, multi_tensor=True, operators_per_parameter=0.0, traffic_ratio=0.0, is_fused=True
        )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can update some rows of a parameter as it would update the whole."""
    return type(optimizer) in _ELEMENTWISE


def measure_optimizer_cost(
    make_optimizer: OptimizerFactory, multi_tensor: bool, shape: tuple[int, ...] = (_ELEMENTS,)
) -> OptimizerCost:
    """Returns the cost of the optimizer that `make_optimizer` builds, for parameters of this shape. If `multi_tensor`
    is True and the optimizer has a multi-tensor implementation, that one is measured."""
    parameters = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    optimizer = make_optimizer(parameters)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if "foreach" in group and not is_fused:
            group["foreach"] = multi_tensor
    multi_tensor = multi_tensor and any("foreach" in group for group in optimizer.param_groups)
    _set_gradients(parameters)
    optimizer.step()  # creates the state
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    state = [tensor for tensor in tensors if tensor.numel() >= _ELEMENTS]
    recorder = TraceRecorder({}, frozenset())
    _set_gradients(parameters)
    recorder.register_existing([parameters, [p.grad for p in parameters], list(optimizer.state.values())])
    with recorder, torch.no_grad():
        optimizer.step()
    parameter_bytes = sum(p.numel() * p.element_size() for p in parameters)
    # A profiler adds `_record_function` operators.
    operators = [o for o in recorder.trace.operators if not o.name.startswith("_record_function")]
    return OptimizerCost(
        state_ratio=sum(v.numel() * v.element_size() for v in state) / parameter_bytes,
        temporary_ratio=_peak_bytes(recorder)
        / (parameter_bytes if multi_tensor else parameter_bytes / len(parameters)),
        multi_tensor=multi_tensor,
        operators_per_parameter=0.0 if multi_tensor else len(operators) / len(parameters),
        traffic_ratio=0.0 if multi_tensor else sum(map(_traffic_bytes, operators)) / parameter_bytes,
        has_fused="fused" in optimizer.defaults,
        elementwise=is_elementwise(optimizer),
        state_numbers=(len(tensors) - len(state)) / len(parameters),
    )


def _set_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _peak_bytes(recorder: TraceRecorder) -> int:
    """The largest sum of temporary bytes at any time of the recorded step."""
    allocated = peak = 0
    for event in recorder.trace.memory:
        allocated += event.bytes if abs(event.bytes) >= _ELEMENTS else 0
        peak = max(peak, allocated)
    return peak


def _traffic_bytes(operator: RecordedOperator) -> int:
    """Bytes that an operator reads and writes. A tensor that it changes in place counts twice. Operators on small
    tensors (step counts and the like) count as 0."""
    if not operator.name.endswith("_"):
        written_in_place = 0
    elif not operator.shape:  # a fused operator on lists of tensors, which changes most of what it reads
        written_in_place = operator.bytes
    else:
        written_in_place = operator.shape[0] * ITEM_BYTES.get(operator.dtype, 4)
    return operator.bytes + written_in_place if operator.bytes >= _ELEMENTS else 0


def optimizer_cost(template: torch.optim.Optimizer | None, on_gpu: bool) -> OptimizerCost:
    """Returns the cost of an optimizer with the class and options of `template`, or zero cost if `template` is None. On
    a GPU, the multi-tensor implementation is measured unless the options contain `foreach=False`. An optimizer that
    steps on vectors is measured on them, and else on matrices. One that steps on neither outside of its script, because
    it needs a closure or other arguments, counts as Adam that keeps its state for whole parameters."""
    if template is None:
        return OptimizerCost(state_ratio=0.0, temporary_ratio=0.0, multi_tensor=False)
    check_is_optimizer(template)
    optimizer_class = type(template)
    option_names = inspect.signature(optimizer_class).parameters
    options = {k: v for k, v in template.param_groups[0].items() if k in option_names and k != "params"}

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer_class(parameters, **options)

    multi_tensor = on_gpu and options.get("foreach") is not False
    for shape in ((_ELEMENTS,), (_ELEMENTS // 64, 64)):
        try:
            return measure_optimizer_cost(make_optimizer, multi_tensor, shape)
        except Exception:  # whatever the optimizer's own code raises on parameters that are not the model's
            continue
    adam = measure_optimizer_cost(torch.optim.Adam, multi_tensor)
    return replace(adam, has_fused=False, elementwise=False)


def check_is_optimizer(optimizer: Any) -> None:
    """Raises an `InputError` if the value is not a torch optimizer, but a class or a function that makes one, for
    example."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, type):
        value = f"the class {optimizer.__name__}"
    elif callable(optimizer) and hasattr(optimizer, "__name__"):
        value = f"the function {optimizer.__name__}"
    else:
        value = f"a {type(optimizer).__name__}"
    raise InputError(
        f"optimizer is {value}, not a torch optimizer: construct one and pass it, for example"
        " optimizer=torch.optim.SGD(model.parameters(), lr=0.1)"
    )
