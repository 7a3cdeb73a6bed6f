"""`SafeUnpickler`: reads a pickle that somebody else may have crafted. It calls only what `find_class` of a derived
class returns, changes no object, and does not nest tuples so deeply that hashing them would crash."""

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar

_MOST_INSTRUCTIONS = 2 * 10**6  # a tensor takes about 30, and one instruction up to 300 bytes of memory
_DEEPEST_TUPLE = 50
_MOST_VALUES_IN_TUPLE = 10**6  # those of inner tuples count each time, because hashing looks at them each time
# The implementation of pickle in Python, which that in C replaces under the public name. The one in C reserves as much
# memory as a crafted file tells it to.
_PythonUnpickler: Any = pickle._Unpickler


class _Tuple(tuple[Any, ...]):
    """A tuple that knows how deeply tuples are nested in it, and how many values are in it and in these."""

    depth: int
    values: int


class _CountedInstructions(dict[int, Callable[[Any], None]]):
    """The functions that carry out the instructions of a pickle. Refuses to go on after many instructions."""

    left = _MOST_INSTRUCTIONS

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self.left -= 1
        if self.left < 0:
            raise pickle.UnpicklingError("its pickle has too many instructions")
        return super().__getitem__(code)


class SafeUnpickler(_PythonUnpickler):
    """Reads one pickle. Every error is a pickle.UnpicklingError or another exception of the standard library."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.__dict__["dispatch"] = _CountedInstructions(self.dispatch)  # hides the variable of the class

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name in the pickle stands for. Derived classes override it."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read from files")

    def _append_tuple(self, items: list[Any]) -> None:
        result = _Tuple(items)
        inner = [item for item in items if isinstance(item, _Tuple)]
        result.depth = 1 + max((item.depth for item in inner), default=0)
        result.values = len(items) + sum(item.values for item in inner)
        if result.depth > _DEEPEST_TUPLE or result.values > _MOST_VALUES_IN_TUPLE:
            raise pickle.UnpicklingError("its tuples are nested too deeply")
        self.append(result)

    def _load_tuple(self) -> None:
        self._append_tuple(self.pop_mark())

    def _load_short_tuple(self, size: int) -> None:
        items = self.stack[-size:]
        del self.stack[-size:]
        self._append_tuple(items)

    def _refuse_build(self) -> None:
        raise pickle.UnpicklingError("it sets the state of an object that has none")

    def _refuse_bytearray(self) -> None:
        """The method of the base class reserves as much memory as the pickle says, before it reads anything."""
        raise pickle.UnpicklingError("it has a bytearray, which is not read from files")

    def _load_new_object(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        self.append(kind(*arguments))

    dispatch[pickle.TUPLE[0]] = _load_tuple
    dispatch[pickle.TUPLE1[0]] = lambda self: self._load_short_tuple(1)
    dispatch[pickle.TUPLE2[0]] = lambda self: self._load_short_tuple(2)
    dispatch[pickle.TUPLE3[0]] = lambda self: self._load_short_tuple(3)
    dispatch[pickle.BYTEARRAY8[0]] = _refuse_bytearray
    dispatch[pickle.BUILD[0]] = _refuse_build
    dispatch[pickle.NEWOBJ[0]] = _load_new_object
