"""`ProfileCache`: values that follow from a profile, or from another large value, for those that were used last. A
planner predicts many plans that divide, cut or compile a model in the same way."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ProfileCache(Generic[Value]):
    """Keeps the `size` values that were used last. Profiles are recognized by their identity, because comparing what is
    in them takes long; those that a value was made of are kept with it, so that no other profile gets their id."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[tuple[int, Hashable], tuple[object, Value]] = OrderedDict()

    def get(self, profile: object, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value of `make`, which must follow from the profile and the key alone."""
        whole_key = (id(profile), key)
        if whole_key in self._values:
            self._values.move_to_end(whole_key)
            return self._values[whole_key][1]
        value = make()
        self._values[whole_key] = (profile, value)
        if len(self._values) > self._size:
            self._values.popitem(last=False)
        return value
