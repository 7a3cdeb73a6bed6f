"""`SafeUnpickler`: reads a pickle that somebody else may have crafted. It calls only what `find_class` of a derived
class returns, changes no object but those of `StandIn`, and does not nest tuples so deeply that hashing them would
crash."""

import pickle
from collections.abc import Callable
from typing import Any, ClassVar

_DEEPEST_TUPLE = 50
# The implementation of pickle in Python, which that in C replaces under the public name. The one in C reserves as much
# memory as a crafted file tells it to.
_PythonUnpickler: Any = pickle._Unpickler


class StandIn:
    """An object of a pickle, in place of one of the class `kind` that the pickle names. `fields` is its state."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {}


class _Tuple(tuple[Any, ...]):
    """A tuple that knows how deeply tuples are nested in it."""

    depth: int


class SafeUnpickler(_PythonUnpickler):
    """Reads one pickle. Every error is a pickle.UnpicklingError or another exception of the standard library."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name in the pickle stands for. Derived classes override it."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read from files")

    def _append_tuple(self, items: list[Any]) -> None:
        result = _Tuple(items)
        result.depth = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
        if result.depth > _DEEPEST_TUPLE:
            raise pickle.UnpicklingError("its tuples are nested too deeply")
        self.append(result)

    def _load_tuple(self) -> None:
        self._append_tuple(self.pop_mark())

    def _load_short_tuple(self, size: int) -> None:
        items = self.stack[-size:]
        del self.stack[-size:]
        self._append_tuple(items)

    def _load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not StandIn:
            raise pickle.UnpicklingError("it sets the state of an object that has none")
        target.fields = dict(state) if isinstance(state, dict) else {"state": state}

    def _load_new_object(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        self.append(kind(*arguments))

    dispatch[pickle.TUPLE[0]] = _load_tuple
    dispatch[pickle.TUPLE1[0]] = lambda self: self._load_short_tuple(1)
    dispatch[pickle.TUPLE2[0]] = lambda self: self._load_short_tuple(2)
    dispatch[pickle.TUPLE3[0]] = lambda self: self._load_short_tuple(3)
    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.NEWOBJ[0]] = _load_new_object
