"""What is set in torch's compiler while models are compiled, so that it traces them as a whole. Private interfaces of
torch 2.11 to 2.13."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from meshwright.blocks.process_setting import ProcessSetting

_LOSS_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _set() -> Callable[[], None]:
    fill_caches()
    undo_each = (_leave_out_logging(), _trace_cross_entropies(), _ignore_untraced_functions())

    def undo() -> None:
        for undo_one in undo_each:
            undo_one()

    return undo


def _turn_off_optimize_ddp() -> Callable[[], None]:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = False

    def undo() -> None:
        torch._dynamo.config.optimize_ddp = before

    return undo


COMPILER_SETTINGS = ProcessSetting(_set)
# Makes the compiler leave functions whole that compute gradients of several DDP buckets. It cannot divide functions
# that recompute activations.
WHOLE_ACROSS_DDP_BUCKETS = ProcessSetting(_turn_off_optimize_ddp)


def fill_caches() -> None:
    """Makes the compiler note torch's functions now, by which it later recognizes them. It would note them when it runs
    for the first time, and the cross entropies may be replaced then (train/loss/cross_entropy.py)."""
    torch.overrides.get_overridable_functions()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()


class _LoggerMethods(set[Any]):
    """A set that has all methods of loggers, besides its members. Iterating yields the members only, because torch
    2.11 sorts them, and functions have no order."""

    def __contains__(self, function: object) -> bool:
        name = getattr(function, "__name__", "")
        is_method = isinstance(getattr(function, "__self__", None), logging.Logger)
        return is_method or getattr(logging.Logger, name, None) is function or super().__contains__(function)


def _leave_out_logging() -> Callable[[], None]:
    """Makes the compiler leave out calls of loggers, for which it would compile a function in parts. Returns the
    function that undoes this."""
    config: Any = torch._dynamo.config
    before = getattr(config, "ignore_logging_functions", None)
    if before is None:  # another version of torch: such a function is compiled in parts
        return lambda: None
    config.ignore_logging_functions = _LoggerMethods(before)

    def undo() -> None:
        config.ignore_logging_functions = before

    return undo


def _ignore_untraced_functions() -> Callable[[], None]:
    """Ignores the warning of a function that the compiler cannot trace: `Compilation.check_step` says the same in one
    line. Returns the function that undoes this."""
    warnings.filterwarnings("ignore", message="Dynamo does not know how to trace")
    added = warnings.filters[0]

    def undo() -> None:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    return undo


def _trace_cross_entropies() -> Callable[[], None]:
    """Makes the compiler trace an `nn.CrossEntropyLoss` that a function makes as a call of `F.cross_entropy`, which may
    be replaced by a function that counts, or be given scores that stand for a tensor. It would put the function into
    its graph unseen. Returns the function that undoes this."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import LambdaVariable
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    kind: Any = UserDefinedClassVariable
    original = getattr(kind, "_call_cross_entropy_loss", None)
    if original is None:  # another version of torch
        return lambda: None

    def make_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        options = {**dict(zip(_LOSS_OPTIONS, args, strict=False)), **kwargs}

        def loss(input: Any, target: Any) -> Any:
            source = AttrSource(tx.import_source("torch.nn.functional"), "cross_entropy")
            function = VariableTracker.build(tx, torch.nn.functional.cross_entropy, source)
            return function.call_function(tx, [input, target], options)

        return LambdaVariable(loss)

    kind._call_cross_entropy_loss = make_loss

    def undo() -> None:
        kind._call_cross_entropy_loss = original

    return undo
