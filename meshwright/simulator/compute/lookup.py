"""Finds the class of an operator and the logarithms of the sizes that decide how fast it is. A class is a set of
operators whose measured times are interpolated together, such as `matmul` or `softmax`.

A profile states some sizes only through the bytes of an operator. The bytes of a BatchNorm that do not grow with the
batch tell its number of channels; the bytes of a convolution beyond images and filters tell whether it has a bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, log2, prod

from meshwright.blocks.operator_kinds import GROUPED_PRODUCTS
from meshwright.cluster.cluster import OperatorTime
from meshwright.dtypes import ITEM_BYTES
from meshwright.profile.values import Operator

# Rows whose length is no multiple of this are read with more loads. CUDA C++ Programming Guide, Device Memory Accesses:
# an instruction reads words of 1, 2, 4, 8 or 16 bytes, at addresses that are multiples of their size.
_ALIGNED_BYTES = 16
# Factors of the logarithms of a filter's side and of a stride, and the distances of grouped from plain convolutions and
# of unaligned from aligned convolutions, in doublings of a size. Because of these distances, only similar convolutions
# are interpolated. The values do not depend on the device: `python -m validation.interpolation` compares them with
# smaller and larger ones.
FILTER_DISTANCE = STRIDE_DISTANCE = 2.0
GROUPED_DISTANCE = UNALIGNED_DISTANCE = 4.0
# How many vectors with one number per channel BatchNorm reads and writes, forward (False) and backward (True). They
# were counted in the arguments of torch's native_batch_norm and native_batch_norm_backward.
_CHANNEL_VECTORS = {False: 6.0, True: 7.0}
_WRITE_ONLY = ("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_")  # in place, and not read
_CLASSES = {  # by a part of the operator's name, the first that fits
    "log_softmax": "log_softmax",
    "softmax": "softmax",
    "nll_loss": "loss",
    "max_pool": "pooling",
    "gelu": "gelu",
    "native_dropout": "dropout",
}
# Classes that a calibration may lack, and the classes that are used instead.
SUBSTITUTE_CLASSES = {
    "input_gradient": "matmul",
    "weight_gradient": "matmul",
    "softmax": "log_softmax",
    "log_softmax": "softmax",
    "gelu": "elementwise",
    "dropout": "elementwise",
    "widen": "elementwise",
}
_WIDENING_BYTES = 6  # a number of 16 bits is read, one of 32 bits is written


@dataclass(frozen=True)
class OperatorClass:
    """The class of an operator (`name`), the logarithms to the base of two of the sizes by which its time is looked up,
    its FLOPs, and the bytes that it reads and writes."""

    name: str
    sizes: tuple[float, ...]
    flops: float
    bytes: float


def classify_operator(
    operator: Operator, batch: float, scale: float, backward: bool, memory: float = 1.0
) -> OperatorClass | None:
    """The class of an operator; None for allocations and views. The products of the device are `scale` times slower,
    and its memory is `memory` times slower, than those of the device that was measured. Sizes are multiplied by these
    factors, which gives the sizes that keep the measured device busy for as long."""
    kind = operator.kind
    flops, traffic = operator.flops.at(batch), operator.bytes.at(batch)
    if kind == "view" or operator.name.startswith(("empty", "new_empty")):
        return None
    shape, size = [side.at(batch) for side in operator.shape], ITEM_BYTES.get(operator.dtype, 4)
    if kind == "matmul" and (groups := group_count(operator)):
        m, n, k = shape[1:]
        m, k = (m, k) if operator.shape[1].linear else (k, m)  # a gradient of weights sums over the rows
        return OperatorClass("grouped_matmul", _logs(groups, m * scale, n, k), flops, traffic)
    if kind == "matmul" and shape[0] > 1:
        return OperatorClass("batched_matmul", _logs(shape[0] * scale, *shape[1:]), flops, traffic)
    if kind == "matmul":
        return OperatorClass(_product_class(operator), _logs(shape[1] * scale, *shape[2:]), flops, traffic)
    if kind == "attention":
        flops /= 2 if shape[-1] else 1  # pairs above the causal mask are not computed
        return OperatorClass("attention", _logs(shape[0] * shape[1] * scale, shape[2], shape[4]), flops, traffic)
    if kind == "convolution":
        return OperatorClass("convolution", _convolution_sizes(shape, scale, size), flops, traffic)
    if kind == "norm" and "batch_norm" in operator.name:
        channels = operator.bytes.constant / 4 / _CHANNEL_VECTORS[backward]
        return OperatorClass("batch_norm", _logs(traffic * memory, max(channels, 1.0)), flops, traffic)
    if kind == "elementwise" and operator.name.endswith("_") and operator.name not in _WRITE_ONLY and shape:
        traffic += shape[0] * size  # the profile counts the tensor once, but an in-place operator reads and writes it
    if (
        operator.name == "_to_copy"
        and size == 2
        and shape
        and isclose(traffic, _WIDENING_BYTES * shape[0], rel_tol=1e-6)
    ):
        return OperatorClass("widen", _logs(traffic * memory), 0.0, traffic)
    return OperatorClass(_class(operator), _logs(traffic * memory), 0.0, traffic)


def group_count(operator: Operator) -> float:
    """The number of matrices of a grouped product; 0 for other products. The bytes that do not grow with the batch are
    those of the matrices, and of one int32 per group."""
    if operator.name not in ("_grouped_mm", *GROUPED_PRODUCTS):
        return 0.0
    sides = [size.constant for size in operator.shape[1:] if not size.linear]
    return operator.bytes.constant / (prod(sides) * ITEM_BYTES.get(operator.dtype, 4) + 4)


def _class(operator: Operator) -> str:
    if operator.kind in ("norm", "embedding"):
        return operator.kind
    by_name = next((name for word, name in _CLASSES.items() if word in operator.name), None)
    if by_name or operator.kind == "reduction":
        return by_name or "reduction"
    return "copy" if operator.name == "clone" else "elementwise"


def _product_class(operator: Operator) -> str:
    """The name of a product's class. With an unaligned dimension it is `matmul` and that dimension (`matmul k`).
    Otherwise it is `weight_gradient` (which sums over the samples), `input_gradient`, or `matmul` for other
    products."""
    odd, (m, k) = _unaligned_dimension(operator), (operator.shape[1].linear, operator.shape[3].linear)
    if odd or not operator.computes_gradient or bool(m) == bool(k):
        return f"matmul{odd}"
    return "weight_gradient" if k else "input_gradient"


def _unaligned_dimension(operator: Operator) -> str:
    """The dimension of a product whose size in bytes is no multiple of `_ALIGNED_BYTES`: " k", " m" or " n", or an
    empty string if all are aligned. Dimensions that grow with the batch are numbers of rows, and need no alignment."""
    step = _ALIGNED_BYTES // ITEM_BYTES.get(operator.dtype, 4)
    odd = {
        side for side, size in zip("mnk", operator.shape[1:], strict=True) if not size.linear and size.constant % step
    }
    return next((f" {side}" for side in "kmn" if side in odd), "")


def as_single_product(operator: Operator, batch: float, scale: float) -> tuple[str, tuple[float, ...]]:
    """The class and the logarithms of the sizes of a product of all rows of a grouped product with one matrix."""
    _, m, n, k = (size.at(batch) for size in operator.shape)
    return _product_class(operator), _logs(m * scale, n, k)


def as_stacked_product(operator: Operator, batch: float, scale: float) -> tuple[str, tuple[float, ...]]:
    """The class and the logarithms of the sizes of a single product with as many rows as all products of a batched
    product have together."""
    count, m, n, k = (size.at(batch) for size in operator.shape)
    return f"matmul{_unaligned_dimension(operator)}", _logs(count * m * scale, n, k)


def bias_bytes(operator: Operator, batch: float, backward: bool) -> float:
    """The bytes that are read and written to add a convolution's bias or, in the backward pass, to sum the bias's
    gradient; 0 if the convolution has no bias."""
    n, c_in, h, w, c_out, kernel, stride, groups = (size.at(batch) for size in operator.shape)
    size, flops = ITEM_BYTES.get(operator.dtype, 4), operator.flops.at(batch)
    flops_per_output = 2 * c_in / groups * kernel**2
    gradients = min(2, max(1, round(flops / (n * c_out * h * w / stride**2 * flops_per_output)))) if backward else 1
    out = flops / gradients / flops_per_output
    image, filters = n * c_in * h * w, c_out * c_in / groups * kernel**2
    counted = out + (gradients * image + 2 * filters if backward else image + filters)
    # A bias or its gradient has c_out numbers. Except for rounding errors, as many numbers remain, or none.
    if operator.bytes.at(batch) / size - counted < 0.9 * c_out:
        return 0.0
    return (1 if backward else 2) * out * size


def _convolution_sizes(shape: Sequence[float], scale: float, itemsize: int) -> tuple[float, ...]:
    n, c_in, h, w, c_out, kernel, stride, groups = shape
    pixels = n * scale * (h / stride) * (w / stride)
    # A convolution with filters of one pixel runs as a plain product, unless a load of 16 bytes spans two channels.
    unaligned = kernel == stride == 1 and bool(h * w * itemsize % _ALIGNED_BYTES)
    separated = (
        FILTER_DISTANCE * log2(kernel),
        STRIDE_DISTANCE * log2(stride),
        GROUPED_DISTANCE * (groups > 1),
        UNALIGNED_DISTANCE * unaligned,
    )
    return (*_logs(pixels, c_in / groups, c_out / groups), *separated)


def as_matrix_product(
    operator: Operator, convolution: OperatorClass, batch: float, scale: float
) -> OperatorClass | None:
    """The class of the matrix product that computes the same as a convolution; None for a grouped convolution."""
    n, c_in, h, w, c_out, kernel, stride, groups = (size.at(batch) for size in operator.shape)
    if groups > 1:
        return None
    rows = n * (h / stride) * (w / stride)
    return OperatorClass("matmul", _logs(rows * scale, c_out, c_in * kernel**2), convolution.flops, convolution.bytes)


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(log2(max(size, 1e-9)) for size in sizes)


def classify_measurement(row: OperatorTime) -> tuple[str, tuple[float, ...]]:
    """The class and the logarithms of the sizes of a measured operator, which match those of `classify_operator`."""
    shape = row.shape
    if row.operator == "attention":
        batch, heads, sequence, width = shape
        return "attention", _logs(batch * heads, sequence, width)
    if row.operator == "convolution":
        return "convolution", _convolution_sizes(shape, 1.0, 2 if row.dtype in ("bf16", "fp16") else 4)
    if row.operator == "matmul":
        # Calibration measures sizes that are multiples of 8, and therefore aligned in 16 and in 32 bits, and on purpose
        # some sizes that are not.
        odd = next((f" {side}" for side, size in zip("mnk", shape, strict=True) if size % 8), "")
        return f"matmul{odd}", _logs(*shape)
    if row.operator in ("batched_matmul", "grouped_matmul", "input_gradient", "weight_gradient"):
        return row.operator, _logs(*shape)
    if row.operator == "norm" and len(shape) == 4:
        return "batch_norm", _logs(row.bytes, shape[1])
    if row.operator == "optimizer":
        return f"optimizer {shape[2]}", _logs(row.bytes)
    return row.operator, _logs(row.bytes)


def with_measured_rows(calibrated: tuple[OperatorTime, ...], new: tuple[OperatorTime, ...]) -> tuple[OperatorTime, ...]:
    """Returns the calibrated rows followed by the new rows.

    A look-up interpolates within one class (operator, direction, dtype, layout). If the calibration lacks the class of
    a new row, for example its backward direction, copies of the most similar calibrated rows are added to the class
    first, because otherwise the model's few shapes would price all other shapes of that class. Shapes that are measured
    in this class themselves are not copied. A new row is left out if no calibrated row is similar."""
    rows = list(calibrated)
    measured = {(_row_class(row), row.shape) for row in new}
    for row in new:
        key = _row_class(row)
        if not any(_row_class(other) == key for other in rows):
            name, _, dtype, _ = key
            same_dtype = [other for other in calibrated if other.dtype == dtype]
            similar = [other for other in same_dtype if _row_class(other)[0] == name]
            similar = similar or [other for other in same_dtype if _row_class(other)[0] == SUBSTITUTE_CLASSES.get(name)]
            similar = [other for other in similar if other.direction == row.direction] or similar
            similar = [other for other in similar if other.layout == row.layout] or [
                other for other in similar if other.layout == "contiguous"
            ]
            new_class = {"operator": row.operator, "direction": row.direction, "layout": row.layout}
            copies = [other.model_copy(update=new_class) for other in similar]
            rows += [copy for copy in copies if (_row_class(copy), copy.shape) not in measured]
            if not similar:
                continue
        rows.append(row)
    return tuple(rows)


def _row_class(row: OperatorTime) -> tuple[str, str, str, str]:
    return classify_measurement(row)[0], row.direction, row.dtype, row.layout
