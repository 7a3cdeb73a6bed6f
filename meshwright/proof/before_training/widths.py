"""Makes wide layers of a model narrow for its check. Every dimension of a parameter or buffer that has one of the given
sizes gets a smaller one, so sizes that are equal stay equal. Whether the model still runs has to be tried: its code may
compute a size from others, such as the features of an image that is flattened."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

NARROW = 64  # features of a layer that is made narrow
_WIDE = 4 * NARROW


def wide_sizes(model: nn.Module, removed: frozenset[int] = frozenset()) -> list[int]:
    """Returns the sizes of wide layers, those first that most weights belong to. `removed` are the ids of parameters
    that are left out."""
    weights: Counter[int] = Counter()
    for parameter in model.parameters():
        if id(parameter) not in removed:
            for size in set(parameter.shape):
                weights[size] += parameter.numel() if size >= _WIDE else 0
    return [size for size, count in weights.most_common() if count]


def narrow_shape(shape: tuple[int, ...], widths: Mapping[int, int]) -> tuple[int, ...]:
    """Returns the shape of a parameter after its wide dimensions are made narrow."""
    return tuple(widths.get(size, size) for size in shape)


def narrow_widths(model: nn.Module, widths: Mapping[int, int]) -> None:
    """Makes dimensions of these sizes smaller, in place. Tied weights stay tied. Numbers in the attributes of modules
    and in a model's configuration are changed, too."""
    if not widths:
        return
    narrowed: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the tensor itself, since ids are reused

    def narrow(value: Tensor) -> Tensor:
        if narrow_shape(tuple(value.shape), widths) == tuple(value.shape):
            return value
        if id(value) not in narrowed:
            part = value.detach()
            for dim, size in enumerate(value.shape):
                part = part.narrow(dim, 0, widths.get(size, size))
            part = part.clone()
            part = nn.Parameter(part, value.requires_grad) if isinstance(value, nn.Parameter) else part
            narrowed[id(value)] = (value, part)
        return narrowed[id(value)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, value in tensors.items():
                if value is not None:
                    tensors[key] = narrow(value)  # type: ignore[assignment]
        for holder in (module, getattr(module, "config", None)):
            _narrow_numbers(holder, widths)


def _narrow_numbers(holder: Any, widths: Mapping[int, int]) -> None:
    for key, value in list(getattr(holder, "__dict__", {}).items()):
        if type(value) is int and value in widths:
            setattr(holder, key, widths[value])
        elif type(value) is tuple and any(type(item) is int and item in widths for item in value):
            setattr(holder, key, tuple(widths.get(item, item) if type(item) is int else item for item in value))
