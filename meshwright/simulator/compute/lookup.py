"""As what an operator was measured: the class, and the logarithms of the sizes that decide how fast it is.

A profile tells some sizes only through its bytes: those that do not grow with the batch are a BatchNorm's channels, and
what a convolution moves beyond images and filters is its bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, log2

from meshwright.cluster.cluster import OperatorTime
from meshwright.profile.values import Operator

_ALIGNED_BYTES = 16  # of a row: what one load of a GPU takes at most
_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_VECTORS = {False: 6.0, True: 7.0}  # of one number a channel, that BatchNorm reads and writes, forward and backward
_FILLED = ("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_")  # in place, and not read
_CLASSES = {  # by a part of their names, the first that fits
    "log_softmax": "log_softmax",
    "softmax": "softmax",
    "nll_loss": "loss",
    "max_pool": "pooling",
    "gelu": "gelu",
    "native_dropout": "dropout",
}
# Classes that a calibration may lack, and those that it then has for them.
STAND_INS = {
    "input_gradient": "matmul",
    "weight_gradient": "matmul",
    "softmax": "log_softmax",
    "log_softmax": "softmax",
    "gelu": "elementwise",
    "dropout": "elementwise",
    "widen": "elementwise",
}
_WIDER_BYTES = 6  # a number of 16 bits read, one of 32 written


@dataclass(frozen=True)
class LookedUp:
    name: str
    sizes: tuple[float, ...]
    flops: float
    bytes: float


def looked_up(operator: Operator, batch: float, scale: float, backward: bool, memory: float = 1.0) -> LookedUp | None:
    """For a device that is `scale` times slower than the measured one, and its memory `memory` times; None for what
    only makes room or looks again."""
    kind = operator.kind
    flops, moved = operator.flops.at(batch), operator.bytes.at(batch)
    if kind == "view" or operator.name.startswith(("empty", "new_empty")):
        return None
    shape, size = [side.at(batch) for side in operator.shape], _SIZES.get(operator.dtype, 4)
    if kind == "matmul" and shape[0] > 1:
        return LookedUp("batched_matmul", _logs(shape[0] * scale, *shape[1:]), flops, moved)
    if kind == "matmul":
        return LookedUp(_product(operator), _logs(shape[1] * scale, *shape[2:]), flops, moved)
    if kind == "attention":
        flops /= 2 if shape[-1] else 1  # what lies ahead of a token is not computed
        return LookedUp("attention", _logs(shape[0] * shape[1] * scale, shape[2], shape[4]), flops, moved)
    if kind == "convolution":
        return LookedUp("convolution", _convolution(shape, scale, size), flops, moved)
    if kind == "norm" and "batch_norm" in operator.name:
        channels = operator.bytes.constant / 4 / _VECTORS[backward]
        return LookedUp("batch_norm", _logs(moved * memory, max(channels, 1.0)), flops, moved)
    if kind == "elementwise" and operator.name.endswith("_") and operator.name not in _FILLED and shape:
        moved += shape[0] * size  # counted once, but read and written
    if operator.name == "_to_copy" and size == 2 and shape and isclose(moved, _WIDER_BYTES * shape[0], rel_tol=1e-6):
        return LookedUp("widen", _logs(moved * memory), 0.0, moved)
    return LookedUp(_class(operator), _logs(moved * memory), 0.0, moved)


def _class(operator: Operator) -> str:
    if operator.kind in ("norm", "embedding"):
        return operator.kind
    found = next((name for word, name in _CLASSES.items() if word in operator.name), None)
    if found or operator.kind == "reduction":
        return found or "reduction"
    return "copy" if operator.name == "clone" else "elementwise"


def _product(operator: Operator) -> str:
    """Whether rows fit what a load takes, and which way the operands of a product lie if they do: the inner side of a
    weight's gradient is the samples."""
    odd, (m, k) = _odd(operator), (operator.shape[1].linear, operator.shape[3].linear)
    if odd or not operator.gradient or bool(m) == bool(k):
        return f"matmul{odd}"
    return "weight_gradient" if k else "input_gradient"


def _odd(operator: Operator) -> str:
    """The side of a product, if any, whose rows are no multiple of what a load takes: of the inner one, of a weight's
    gradient, of the result. Sides that grow with the batch are numbers of rows."""
    step = _ALIGNED_BYTES // _SIZES.get(operator.dtype, 4)
    odd = {
        side for side, size in zip("mnk", operator.shape[1:], strict=True) if not size.linear and size.constant % step
    }
    return next((f" {side}" for side in "kmn" if side in odd), "")


def stacked(operator: Operator, batch: float, scale: float) -> tuple[str, tuple[float, ...]]:
    """Batched products as one of all their rows: its class and sizes."""
    many, m, n, k = (size.at(batch) for size in operator.shape)
    return f"matmul{_odd(operator)}", _logs(many * m * scale, n, k)


def bias_of(operator: Operator, batch: float, backward: bool) -> float:
    """The bytes that adding a convolution's bias moves, or summing up its gradient; 0 where it has none."""
    n, c_in, h, w, c_out, kernel, stride, groups = (size.at(batch) for size in operator.shape)
    size, flops = _SIZES.get(operator.dtype, 4), operator.flops.at(batch)
    of_one = 2 * c_in / groups * kernel**2
    gradients = min(2, max(1, round(flops / (n * c_out * h * w / stride**2 * of_one)))) if backward else 1
    out = flops / gradients / of_one
    image, filters = n * c_in * h * w, c_out * c_in / groups * kernel**2
    counted = out + (gradients * image + 2 * filters if backward else image + filters)
    if operator.bytes.at(batch) / size - counted < 0.9 * c_out:
        return 0.0
    return (1 if backward else 2) * out * size


def _convolution(shape: Sequence[float], scale: float, itemsize: int) -> tuple[float, ...]:
    n, c_in, h, w, c_out, kernel, stride, groups = shape
    pixels = n * scale * (h / stride) * (w / stride)
    # Filters of one pixel are a plain product, where a load of pixels does not cross channels.
    odd = kernel == stride == 1 and bool(h * w * itemsize % _ALIGNED_BYTES)
    apart = (2 * log2(kernel), 2 * log2(stride), 4.0 * (groups > 1), 4.0 * odd)
    return (*_logs(pixels, c_in / groups, c_out / groups), *apart)


def as_product(operator: Operator, found: LookedUp, batch: float, scale: float) -> LookedUp | None:
    """A convolution as the matrix product that it is; None where each channel has a product of its own."""
    n, c_in, h, w, c_out, kernel, stride, groups = (size.at(batch) for size in operator.shape)
    if groups > 1:
        return None
    rows = n * (h / stride) * (w / stride)
    return LookedUp("matmul", _logs(rows * scale, c_out, c_in * kernel**2), found.flops, found.bytes)


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(log2(max(size, 1e-9)) for size in sizes)


def measured_as(row: OperatorTime) -> tuple[str, tuple[float, ...]]:
    """The same of a measured operator."""
    shape = row.shape
    if row.operator == "attention":
        batch, heads, sequence, width = shape
        return "attention", _logs(batch * heads, sequence, width)
    if row.operator == "convolution":
        return "convolution", _convolution(shape, 1.0, 2 if row.dtype in ("bf16", "fp16") else 4)
    if row.operator == "matmul":
        odd = next((f" {side}" for side, size in zip("mnk", shape, strict=True) if size % 8), "")
        return f"matmul{odd}", _logs(*shape)
    if row.operator in ("batched_matmul", "input_gradient", "weight_gradient"):
        return row.operator, _logs(*shape)
    if row.operator == "norm" and len(shape) == 4:
        return "batch_norm", _logs(row.bytes, shape[1])
    if row.operator == "optimizer":
        return f"optimizer {shape[2]}", _logs(row.bytes)
    return row.operator, _logs(row.bytes)
