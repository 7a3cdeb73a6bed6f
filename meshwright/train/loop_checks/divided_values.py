"""Errors of torch in the forward or backward pass of a model that a plan divides. A rank has a part of each value, and
torch may refuse with it what it does with the whole value. Errors that one device would meet, too, are found before,
when the model is traced. So such an error is told with its own text, the line of the model's code and the plan. What
the model's code raises by itself gets a note only."""

import dis

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.processes.communication_errors import communication_error
from meshwright.processes.stall.out_of_memory import is_out_of_memory
from meshwright.user.code import first_line, is_machinery

_TYPES = (  # of errors that torch raises for values that it cannot compute with
    *(RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError),
    *(NotImplementedError, AssertionError, RecursionError),
)
_DIVIDING_AXES = ("pipeline", "tensor", "context", "expert")


def explain_divided(error: Exception, plan: Plan) -> InputError | None:
    """Returns an error in one line for an error of torch under a plan that divides the model. Returns None for other
    errors, which are raised as they are; an error that the model's own code raises gets a note."""
    axes = [axis for axis in _DIVIDING_AXES if getattr(plan.axes, axis) > 1]
    root = _root(error)
    if not axes or type(root) not in _TYPES or is_out_of_memory(error) or communication_error(error):
        return None
    where = f"under the plan ({plan.summary()}), which divides values over the {' and '.join(axes)} axis"
    remedy = f"if the model runs without it, set plan.axes.{axes[0]} to 1"
    if _is_raised_by_model(root):
        error.add_note(f"{where}: {remedy}")
        return None
    return InputError(f"{type(root).__name__}: {first_line(root)}, {where}: {remedy}")


def _root(error: BaseException) -> BaseException:
    """The error that another one was raised from. Pipelines of torch raise theirs from that of a stage."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_raised_by_model(error: BaseException) -> bool:
    """Whether a `raise` or an `assert` outside of torch and meshwright has raised the error. An error of a function in
    C++ comes from the line that calls it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or is_machinery(last.tb_frame.f_code.co_filename):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
