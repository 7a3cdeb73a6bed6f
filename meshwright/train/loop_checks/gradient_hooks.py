"""Refuses hooks on the gradients of parameters that a plan would run at the wrong place.

Ranks and microbatches call a hook with the gradient of their own samples or tokens, and average or add afterwards.
That is right for a hook h that is linear, such as a mask or a factor, and wrong for one that clips, normalizes or takes
signs:

    mean of h(gₖ) over parts k  =  h(mean of gₖ)   if and only if   h is linear                            _is_linear

Whether a hook is linear is tried: it is called with random gradients. Hooks that were registered after the plan has
divided the model may not run at all, so they are looked for before each update.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import InputError
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.torch_private import fsdp_parameter_groups, gradient_hooks, was_gathered
from meshwright.parallel.weights.layout import local_tensor
from meshwright.plan import Plan
from meshwright.train.loop_checks.module_hooks import ModuleHooks
from meshwright.train.loop_checks.settings import HOOK
from meshwright.user.code import line_of_function

_SCALES = (1e-3, 1.0, 1e3)  # of the gradients of a trial: hooks that clip change large ones only
_TOLERANCE = 1e-3  # relative to the largest number, in fp32
_INSTEAD = "change gradients in session.on_gradients, when they are complete"

Hook = Callable[[Any], Any]


def check_gradient_hooks(model: nn.Module, plan: Plan) -> dict[str, list[Hook]]:
    """Raises an `InputError` if a parameter has a hook that is not linear in its gradient, and the plan divides
    batches. Called before the plan changes the model. Returns the hooks by the names of their parameters."""
    hooks = {name: gradient_hooks(parameter) for name, parameter in model.named_parameters()}
    if _combines_gradients(plan) or plan.axes.pipeline > 1:
        names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters():
            is_combined = _combines_gradients(plan) or names[id(parameter)] > 1  # the stages of tied weights add theirs
            if is_combined and not parameter.is_meta and parameter.requires_grad:
                _refuse_nonlinear(name, parameter, *hooks[name], plan)
    return {name: [*first, *second] for name, (first, second) in hooks.items() if first or second}


def refuse_lost_hooks(hooks: Mapping[str, list[Hook]], parallel: ParallelModel) -> None:
    """Raises an `InputError` if a parameter that had these hooks was split, and its parts do not have them. Called
    after the plan has changed the model."""
    parameters = parallel.parameters()
    for name in hooks.keys() & parameters.keys():
        layout = parallel.layouts.get(name)
        kept = [hook for some in gradient_hooks(parameters[name]) for hook in some]
        if layout is not None and layout.axis != "shard" and not all(hook in kept for hook in hooks[name]):
            raise InputError(
                f"the plan ({parallel.plan.summary()}) splits {name}, and the hook {_describe(hooks[name][0])} on its"
                " gradient cannot run on parts of it: leave its module whole with plan.modules.splits, or"
                f" {_INSTEAD}"
            )


def _refuse_nonlinear(
    name: str, parameter: Tensor, of_gradient: list[Hook], after_accumulation: list[Hook], plan: Plan
) -> None:
    hooks = [(hook, _changed_gradient(hook)) for hook in of_gradient]
    hooks += [(hook, _changed_after_accumulation(hook, parameter)) for hook in after_accumulation]
    for hook, change in hooks:
        if not _is_linear(change, parameter):
            raise InputError(
                f"the hook {_describe(hook)} on the gradient of {name} is not linear, and under the plan"
                f" ({plan.summary()}) it gets the gradients of some samples or tokens before they are added: {_INSTEAD}"
            )


class LateHooks:
    """Looks for hooks and parameters that are new since the plan has divided the model."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._plan = parallel.plan
        self._of_modules = ModuleHooks(parallel)
        self._of_gradients: dict[str, str] = {}  # those that change gradients, by what they are registered with
        self._known = {name: _counted(parameter) for name, parameter in parallel.parameters().items()}
        modules = parallel.module.named_modules() if parallel.plan.axes.shard > 1 else ()
        self._sharded = {
            f"{name}.{key}".lstrip("."): (module, key, parameter)
            for name, module in modules
            for key, parameter in module._parameters.items()
        }

    def check(self, parallel: ParallelModel) -> None:
        """Raises an `InputError` if something new would change training otherwise than on one device."""
        plan = self._plan
        self._of_modules.check()
        averages = _combines_gradients(plan)
        for name, parameter in parallel.parameters().items():
            known = self._known.get(name)
            if known is None or known[0] is not parameter:
                continue
            of_gradient, after_accumulation = gradient_hooks(parameter)
            of_gradient, after_accumulation = of_gradient[known[1] :], after_accumulation[known[2] :]
            if not of_gradient and not after_accumulation:
                continue
            for hook in (*of_gradient, *after_accumulation):
                change = (
                    _changed_gradient
                    if hook in of_gradient
                    else partial(_changed_after_accumulation, parameter=parameter)
                )
                if _changes(change(hook), parameter):
                    self._of_gradients[f"{HOOK}the gradient of {name}"] = _describe(hook)
            if name in parallel.layouts:
                self._refuse_on_parts(name, parameter, of_gradient)
            if plan.axes.shard > 1:
                self._refuse_late(name, of_gradient)  # hooks after accumulation get the mean
            elif averages:
                _refuse_nonlinear(name, parameter, of_gradient, after_accumulation, plan)
            self._known[name] = _counted(parameter)

    def changing(self) -> dict[str, str]:
        """Returns the new hooks that change values, by what they are registered with."""
        return {**self._of_gradients, **self._of_modules.changing()}

    def before_pass(self, parallel: ParallelModel) -> None:
        """Looks for what is new before a forward pass."""
        self._of_modules.watch_new()
        if torch.is_grad_enabled():
            self._check_replaced(parallel)

    def after_pass(self) -> None:
        """Notes after a forward pass what it has registered by itself. Each pass is between the two."""
        self._of_modules.know_own()

    def _check_replaced(self, parallel: ParallelModel) -> None:
        """Raises an `InputError` if a parameter was replaced that the plan has sharded, because in a pass the shards
        take its place again."""
        replaced = [
            (name, module._parameters[key])
            for name, (module, key, parameter) in self._sharded.items()
            if module._parameters.get(key) is not parameter
        ]
        if not replaced:
            return
        units = [unit for unit in parallel.module.modules() if isinstance(unit, FSDPModule)]
        groups = [group for unit in units for group in fsdp_parameter_groups(unit)]
        gathered = [p.unsharded_param for group in groups for p in group.fsdp_params if was_gathered(p)]
        for name, parameter in replaced:
            if not any(parameter is whole for whole in gathered):
                raise InputError(
                    f"{name} was replaced after parallelize, and the plan ({self._plan.summary()}) trains the parameter"
                    " that was there before: replace it before parallelize, or copy values into it"
                )

    def _refuse_on_parts(self, name: str, parameter: Tensor, hooks: list[Hook]) -> None:
        for hook in hooks:
            if not _is_pointwise(_changed_gradient(hook), parameter):
                raise InputError(
                    f"the hook {_describe(hook)} needs the whole gradient of {name}, of which the plan"
                    f" ({self._plan.summary()}) gives each rank a part: leave its module whole with"
                    f" plan.modules.splits, or {_INSTEAD}"
                )

    def _refuse_late(self, name: str, hooks: list[Hook]) -> None:
        if hooks:
            raise InputError(
                f"the hook {_describe(hooks[0])} on the gradient of {name} was registered after parallelize, and the"
                f" plan ({self._plan.summary()}) does not run it on the gradient that is trained with: register it"
                f" before parallelize, or {_INSTEAD}"
            )


def _combines_gradients(plan: Plan) -> bool:
    """Whether gradients are computed in parts, of samples or of tokens, which are added after the hooks have run."""
    by_tokens = plan.axes.context > 1 or (plan.axes.tensor > 1 and plan.modules.sequence)
    return (plan.batch_parts > 1 or by_tokens) and plan.gradients.local_steps == 1


def _counted(parameter: nn.Parameter) -> tuple[nn.Parameter, int, int]:
    """Returns the parameter and the numbers of its hooks."""
    of_gradient, after_accumulation = gradient_hooks(parameter)
    return parameter, len(of_gradient), len(after_accumulation)


def _copied(hook: Hook) -> Hook:
    """Returns the hook with copies of the variables that it uses of its function, so that one which counts or records
    does not see the trial; the hook itself if they cannot be copied."""
    if not isinstance(hook, FunctionType):
        return hook
    try:
        cells = tuple(CellType(deepcopy(cell.cell_contents)) for cell in hook.__closure__ or ())
    except Exception:
        return hook
    return FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)


def _changed_gradient(hook: Hook) -> Callable[[Tensor], Tensor]:
    trial = _copied(hook)

    def change(gradient: Tensor) -> Tensor:
        result = trial(gradient)
        return gradient if result is None else result

    return change


def _changed_after_accumulation(hook: Hook, parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the function of the gradient that the hook is, as it changes a copy of the parameter."""

    trial = _copied(hook)

    def change(gradient: Tensor) -> Tensor:
        copied = nn.Parameter(parameter.detach().clone())
        copied.grad = gradient
        trial(copied)
        is_kept = copied.grad is not None and torch.equal(copied.detach(), parameter.detach())
        return copied.grad if is_kept and copied.grad is not None else gradient.abs()  # an update is not linear

    return change


@torch.no_grad()
def _changes(change: Callable[[Tensor], Tensor], parameter: Tensor) -> bool:
    """Whether a hook returns something else than the gradient. True for a hook that cannot be tried."""
    gradient = torch.ones_like(local_tensor(parameter))
    try:
        return not torch.equal(change(gradient.clone()), gradient)
    except Exception:  # whatever the user's code raises
        return True


@torch.no_grad()
def _is_linear(change: Callable[[Tensor], Tensor], parameter: Tensor) -> bool:
    """Whether change(a + 2 b) = change(a) + 2 change(b). True for a hook that cannot be tried."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype) for _ in range(2)
    )
    for scale in _SCALES:
        a, b = first * scale, second * scale
        try:
            whole, parts = change(a + 2 * b), change(a.clone()) + 2 * change(b.clone())
        except Exception:  # whatever the hook raises on gradients that no loss has
            return True
        largest = torch.maximum(whole.abs().max(), parts.abs().max()) if whole.numel() else whole.sum()
        if not bool(((whole - parts).abs() <= _TOLERANCE * largest).all()):
            return False
    return True


@torch.no_grad()
def _is_pointwise(change: Callable[[Tensor], Tensor], parameter: Tensor) -> bool:
    """Whether each number of the changed gradient depends on one number of the gradient only. True for a hook that
    cannot be tried."""
    gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(parameter)
    other, half = gradient.clone().flatten(), gradient.numel() // 2
    other[half:] *= 3
    try:
        first, second = change(gradient.clone()).flatten(), change(other.view(parameter.shape)).flatten()
    except Exception:  # whatever the hook raises on gradients that no loss has
        return True
    return bool(torch.equal(first[:half], second[:half]))


def _describe(hook: Any) -> str:
    """`clip (my_model.py, line 12)`."""
    function = getattr(hook, "func", hook)
    line = line_of_function(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} ({line})" if line else name
