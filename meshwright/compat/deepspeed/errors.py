"""The error of a wrong call of the drop-in."""

from meshwright.errors import InputError


class CallError(InputError, AssertionError):
    """A function or the engine was called in a wrong way. It is an `AssertionError`, too, because DeepSpeed raises
    those, and scripts catch them."""
