"""Seconds that a device is busy with one operator: the least that its shape allows, times a measured slowdown.

    least    = max(FLOPs / rate of the dtype, bytes / bandwidth)                                    operator_s
    class    = the operators it is interpolated with, and the sizes that decide its speed           classify_operator
    slowdown = measured / least, interpolated between the measured shapes around it                 ShapeTable.slowdown
    seconds  = max(least × slowdown, the shortest that was measured) + those of a convolution's bias  operator_s

The shapes come from a calibration of the device (`doctor --calibrate`; CPU cores are calibrated whenever this machine
is measured). A GPU without a calibration is assumed to be like the reference GPU: an operator that both GPUs would
finish in the same time at their peak rates has the same slowdown. Sizes are therefore scaled by the ratio of the rates
(of the memory bandwidths, for operators that only move bytes) before they are looked up. Datasheet rates are multiplied
by the share of its datasheet rate that the reference GPU reaches, or by a published share (`Device.sustained_shares`).
Products in fp8 were not measured by shape: they have the slowdown of products in bf16 that take as long.
A BatchNorm of contiguous images is limited by multiprocessors or by memory, whichever is slower on the GPU
(`_batch_norm_s`), and so are dropout, GELU and casts to wider types (`_arithmetic_bound_s`). Batched products with an
unaligned dimension are slower by the same factor as plain ones (`_unaligned_slowdown`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from meshwright.cluster.catalog import CATALOG, find_entry
from meshwright.cluster.cluster import Device, OperatorTime
from meshwright.dtypes import DTYPE_NAMES, Dtype
from meshwright.files.yaml_file import read_mapping, validate
from meshwright.profile.values import Operator
from meshwright.simulator.compute.lookup import (
    SUBSTITUTE_CLASSES,
    OperatorClass,
    as_matrix_product,
    as_single_product,
    as_stacked_product,
    bias_bytes,
    classify_measurement,
    classify_operator,
)
from meshwright.simulator.compute.shape_table import ShapeTable
from meshwright.simulator.profile_cache import ProfileCache

REFERENCE: Path = CATALOG / "reference_gpu.yaml"
# A file of its own, one row a line, because JSON is read a hundred times as fast as YAML.
REFERENCE_OPERATORS: Path = CATALOG / "reference_gpu_operators.jsonl"
# The share of its fp32 rate that a GPU without tf32 sustains, if the device has no `sustained_shares` for fp32. It is
# that of the catalog's V100 (meshwright/cluster/catalog/nvidia.yaml, sustained_fp32).
_SUSTAINED_FP32_BEFORE_TF32 = 0.87
# A GPU without tf32 whose rate of another dtype is at most this many times its fp32 rate computes that dtype in fp32.
# On such GPUs in the catalog (nvidia.yaml), the rate of fp16 is at most 0.02 times or at least 1.7 times the rate of
# fp32, so every value between the two leads to the same decisions.
_SAME_RATE = 1.1
_PRODUCT_KINDS = ("matmul", "convolution", "attention")
# For each dtype, the dtypes whose measurements may be used for it, the most similar first.
_SIMILAR_DTYPES = {
    "fp16": ("fp16", "bf16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "tf32": ("tf32", "fp32"),
}
_IMAGE_CLASSES = ("convolution", "batch_norm", "pooling", "bias")  # whose speed depends on the memory layout
# Classes that are slower than other operators with the same bytes. `_VECTOR_BOUND` classes are limited by fp32
# arithmetic, `_CYCLE_BOUND` classes by integer products (for random numbers), loads and stores, of which a
# multiprocessor does equally many per cycle in all generations.
_VECTOR_BOUND, _CYCLE_BOUND = ("gelu",), ("dropout", "widen")
_LARGE_BYTES = 1e8  # the reference GPU's memory needs 20 µs for them, compared with which a kernel's start is short
_LARGEST_LOG_BYTES = 99.0  # more than any operator moves
_TableKey = tuple[str, str, str, str]  # operator, direction, dtype, layout


@dataclass(frozen=True)
class DeviceSpeeds:
    """The speeds from which the times of operators are predicted. `tables` has the measured shapes by class, direction,
    dtype and layout; they were measured on the device itself or on the reference GPU, in the following called the
    measured device.

    `compute_scale`, `memory_scale`, `clock_scale` and `vector_scale` say how many times slower the device is than the
    measured device: in products, memory, clock, and fp32 arithmetic outside of products. `multiprocessors` are the
    numbers of the device and of the measured device, 0 if unknown. `batch_norm_passes`: for each direction, how often
    memory moves the bytes of a BatchNorm. `tuned_fp32_convolutions`: the device has no tf32, and its libraries are
    tuned for fp32 convolutions, unlike those of the measured device. `tf32_convolutions`: fp32 convolutions run in
    tf32."""

    rates: Mapping[str, float]
    bandwidth_bytes_per_s: float
    tables: dict[_TableKey, ShapeTable]
    compute_scale: float
    layout: str = "contiguous"
    memory_scale: float = 1.0
    tuned_fp32_convolutions: bool = False
    clock_scale: float = 1.0
    vector_scale: float = 1.0
    multiprocessors: tuple[int, int] = (0, 0)
    batch_norm_passes: Mapping[str, float] = field(default_factory=dict)
    tf32_convolutions: bool = False

    def table(self, name: str, direction: str, dtype: str) -> ShapeTable | None:
        """The table of a class for this dtype, or for the most similar dtype that was measured. If the backward
        direction was not measured, it is the forward table. None if neither the class nor its substitute was
        measured."""
        table = self._table(name, direction, dtype)
        if table is None and name in SUBSTITUTE_CLASSES:
            return self._table(SUBSTITUTE_CLASSES[name], direction, dtype)
        return table

    def _table(self, name: str, direction: str, dtype: str) -> ShapeTable | None:
        layouts = (self.layout, "contiguous") if name in _IMAGE_CLASSES else ("contiguous",)
        for measured_direction in (direction, "forward"):
            for similar in _SIMILAR_DTYPES.get(dtype, ("fp32", "bf16")):
                for layout in layouts:
                    if (key := (name, measured_direction, similar, layout)) in self.tables:
                        return self.tables[key]
        return None


_SPEEDS: ProfileCache[DeviceSpeeds] = ProfileCache(32)
_TABLES: ProfileCache[dict[_TableKey, ShapeTable]] = ProfileCache(8)


def device_speeds(
    device: Device, dtype: Dtype, cores: int = 1, layout: str = "contiguous", tf32_convolutions: bool = False
) -> DeviceSpeeds:
    """The speeds of a GPU, or of a CPU rank with `cores` cores, that computes products in `dtype`."""
    key = (dtype, cores, layout, tf32_convolutions)
    return _SPEEDS.get(device, key, lambda: _device_speeds(device, *key))


def _device_speeds(device: Device, dtype: Dtype, cores: int, layout: str, tf32_convolutions: bool) -> DeviceSpeeds:
    rates: dict[str, float] = {name: rate * cores for name, rate in device.rates.items()}
    bandwidth = device.bandwidth_bytes_per_s * cores
    if device.operators:
        return DeviceSpeeds(rates, bandwidth, shape_tables(device), 1.0, layout, tf32_convolutions=tf32_convolutions)
    if device.kind == "cpu":
        return DeviceSpeeds(rates, bandwidth, {}, 1.0, layout)
    reference, datasheet = reference_gpu()
    reference_rates: dict[str, float] = {str(name): rate for name, rate in reference.rates.items()}
    datasheet_rates: dict[str, float] = {str(name): rate for name, rate in datasheet.rates.items()}
    reached = {
        name: rate * (1.0 if _is_measured(device, "rates") else reference_rates[name] / datasheet_rates[name])
        for name, rate in rates.items()
        if name in reference_rates and name in datasheet_rates
    }
    if not _is_measured(device, "bandwidth_bytes_per_s"):
        bandwidth *= reference.bandwidth_bytes_per_s / datasheet.bandwidth_bytes_per_s
    product_dtype = dtype if dtype in reached else "fp32"
    return DeviceSpeeds(
        {**rates, **reached, **({} if _is_measured(device, "rates") else _sustained_rates(device))},
        bandwidth,
        _reference_tables(shape_tables(reference), device),
        reference_rates[product_dtype] / reached[product_dtype],
        layout,
        reference.bandwidth_bytes_per_s / bandwidth,
        tuned_fp32_convolutions="tf32" not in rates,
        clock_scale=datasheet.clock_hz / device.clock_hz if device.clock_hz else 1.0,
        vector_scale=datasheet_rates["fp32"] / rates["fp32"],
        multiprocessors=(device.multiprocessors, datasheet.multiprocessors),
        batch_norm_passes=_reference_batch_norm_passes(),
        tf32_convolutions=tf32_convolutions,
    )


def _reference_tables(tables: dict[_TableKey, ShapeTable], device: Device) -> dict[_TableKey, ShapeTable]:
    """The reference GPU's tables for this device. The reference GPU is slower at gradients in tf32 than at other
    products; for a device that is not (`tf32_needs_inner_contiguous`), the tables of other products replace those of
    gradients."""
    if device.tf32_needs_inner_contiguous:
        return tables
    plain = tables[_tf32_key("matmul")]
    return {**tables, _tf32_key("input_gradient"): plain, _tf32_key("weight_gradient"): plain}


def _tf32_key(name: str) -> _TableKey:
    return name, "forward", "tf32", "contiguous"


def _sustained_rates(device: Device) -> dict[str, float]:
    """The rates that the device sustains, by dtype: the datasheet's rate times the published share of it, or times the
    geometric mean of the shares if several were published. Dtypes without a published share are left out, except fp32
    on a GPU without tf32."""
    shares: dict[str, float] = {
        str(dtype): geometric_mean(by_publisher.values())
        for dtype, by_publisher in device.sustained_shares.items()
        if by_publisher and dtype in device.rates
    }
    if "tf32" not in device.rates:
        shares.setdefault("fp32", _SUSTAINED_FP32_BEFORE_TF32)
    if "bf16" in shares and "fp8" in device.rates:  # limited by power, too (nvidia.yaml)
        shares.setdefault("fp8", shares["bf16"])
    rates: dict[str, float] = {str(dtype): rate for dtype, rate in device.rates.items()}
    return {dtype: share * rates[dtype] for dtype, share in shares.items()}


def _is_measured(device: Device, field: str) -> bool:
    """Whether a field of the device was measured. A measured rate is reached; a datasheet's rate is only approached."""
    return device.sources.get(field, "").startswith("measured")


def operator_s(operator: Operator, batch: float, speeds: DeviceSpeeds, backward: bool, tf32: bool = False) -> float:
    """Seconds that the device is busy with the operator; 0 for allocations and views. With `tf32`, fp32 products,
    convolutions and attention run in tf32 if the device has it."""
    dtype = _computed_dtype(operator, speeds, tf32)
    scale = speeds.compute_scale * (speeds.rates["bf16"] / speeds.rates["fp8"] if dtype == "fp8" else 1.0)
    operator_class = classify_operator(operator, batch, scale, backward, speeds.memory_scale)
    if operator_class is None:
        return 0.0
    rate = speeds.rates.get(dtype) or speeds.rates["fp32"]
    least_s = max(operator_class.flops / rate, operator_class.bytes / speeds.bandwidth_bytes_per_s)
    name = operator_class.name
    table = speeds.table(name, "backward" if backward else "forward", dtype)
    slowdown = table.slowdown(operator_class.sizes) if table else 1.0
    if name == "grouped_matmul" and table is None:  # not measured: as a single product of all rows
        single, sizes = as_single_product(operator, batch, speeds.compute_scale)
        table = speeds.table(single, "backward" if backward else "forward", dtype)
        slowdown = table.slowdown(sizes) if table else 1.0
    if name == "convolution" and dtype == "fp32" and speeds.tuned_fp32_convolutions:
        slowdown = min(slowdown, _tuned_slowdown(operator, operator_class, batch, speeds))
    if name == "batched_matmul":
        slowdown *= _unaligned_slowdown(operator, batch, speeds, dtype)
    if table and name == "batch_norm" and speeds.layout == "contiguous" and all(speeds.multiprocessors):
        seconds = _batch_norm_s(operator_class, table, speeds, backward)
    elif table and name in (*_VECTOR_BOUND, *_CYCLE_BOUND):
        seconds = _arithmetic_bound_s(operator_class, table, speeds, dtype, backward)
    else:
        seconds = max(least_s * slowdown, table.shortest_s) if table and least_s else least_s
    if operator.kind == "convolution" and (size := bias_bytes(operator, batch, backward)):
        seconds += memory_bound_s("bias", size, dtype, speeds, backward)
    return seconds


def _computed_dtype(operator: Operator, speeds: DeviceSpeeds, tf32: bool) -> str:
    """The dtype that the device computes the operator in."""
    dtype: str = DTYPE_NAMES.get(operator.dtype, "fp32")
    if dtype == "fp8" and "fp8" not in speeds.rates:
        return "bf16"
    tf32_kinds = _PRODUCT_KINDS if tf32 else ("convolution",) if speeds.tf32_convolutions else ()
    if dtype == "fp32" and operator.kind in tf32_kinds and "tf32" in speeds.rates:
        dtype = "tf32"
    is_product = speeds.tuned_fp32_convolutions and operator.kind in _PRODUCT_KINDS
    if is_product and speeds.rates.get(dtype, 0.0) <= _SAME_RATE * speeds.rates["fp32"]:
        return "fp32"  # the device stores this dtype, and does not compute in it
    return dtype


def _tuned_slowdown(operator: Operator, convolution: OperatorClass, batch: float, speeds: DeviceSpeeds) -> float:
    """The slowdown of an fp32 convolution on a GPU without tf32, whose libraries were tuned for fp32: the smallest of
    three slowdowns on the reference GPU, those of the convolution's forward pass, of its backward pass (Winograd's
    algorithm reaches up to twice the rate of matrix products) and of the equivalent matrix product. The forward pass of
    the reference GPU alone would be too slow, because it reaches half of the rate of matrix products."""
    options: list[tuple[ShapeTable | None, OperatorClass | None]] = [
        (speeds.table("convolution", "forward", "fp32"), convolution),
        (speeds.table("convolution", "backward", "fp32"), convolution),
        (
            speeds.table("matmul", "forward", "fp32"),
            as_matrix_product(operator, convolution, batch, speeds.compute_scale),
        ),
    ]
    return min(table.slowdown(option.sizes) for table, option in options if table and option)


def _unaligned_slowdown(operator: Operator, batch: float, speeds: DeviceSpeeds, dtype: str) -> float:
    """The factor by which batched products take longer because a dimension is unaligned; 1 if all are aligned. Batched
    products were measured with aligned dimensions only, so the factor is that of a single product with the rows of all
    of them."""
    name, sizes = as_stacked_product(operator, batch, speeds.compute_scale)
    aligned, unaligned = speeds.table("matmul", "forward", dtype), speeds.table(name, "forward", dtype)
    if not aligned or not unaligned or name == "matmul":
        return 1.0
    return max(1.0, unaligned.slowdown(sizes) / aligned.slowdown(sizes))


def memory_bound_s(name: str, size_bytes: float, dtype: str, speeds: DeviceSpeeds, backward: bool) -> float:
    """Seconds of an operator of the class `name` that only moves `size_bytes`; 0 if the class was not measured."""
    table = speeds.table(name, "backward" if backward else "forward", dtype)
    if table is None:
        return 0.0
    least_s = size_bytes / speeds.bandwidth_bytes_per_s
    return max(least_s * table.slowdown((log(size_bytes * speeds.memory_scale, 2),)), table.shortest_s)


def _arithmetic_bound_s(
    operator_class: OperatorClass, table: ShapeTable, speeds: DeviceSpeeds, dtype: str, backward: bool
) -> float:
    """Seconds of an operator with much arithmetic for each number. It is the longer of two times: the time in which
    memory moves the same bytes, and the time of the measured device, scaled by the ratio of fp32 arithmetic
    (`_VECTOR_BOUND`) or of multiprocessors times clock (`_CYCLE_BOUND`)."""
    plain = speeds.table("elementwise", "backward" if backward else "forward", dtype) or table
    sizes = operator_class.sizes
    slowdown, least_s = table.slowdown(sizes), operator_class.bytes / speeds.bandwidth_bytes_per_s
    count, measured_count = speeds.multiprocessors
    is_cycle_bound = count and operator_class.name in _CYCLE_BOUND
    scale = speeds.clock_scale * measured_count / count if is_cycle_bound else speeds.vector_scale
    memory_s = least_s * min(slowdown, plain.slowdown(sizes))
    return max(memory_s, least_s / speeds.memory_scale * slowdown * scale, table.shortest_s)


def _batch_norm_s(operator_class: OperatorClass, table: ShapeTable, speeds: DeviceSpeeds, backward: bool) -> float:
    """Seconds of a BatchNorm of contiguous images on a GPU that was not measured. Each block of threads has one
    channel, so 64 channels keep only 64 multiprocessors busy, and memory waits for them: the reference GPU then takes
    12 times as long as its memory needs. The result is the longer of two times. The multiprocessors of this GPU take as
    long as those of the reference GPU, scaled by the clock, and longer if there are more channels than multiprocessors.
    Its memory takes the least time that was measured for the same bytes."""
    log_bytes, log_channels = operator_class.sizes
    least_s = operator_class.bytes / speeds.bandwidth_bytes_per_s
    slowdown = table.slowdown(operator_class.sizes)
    large_slowdown = table.slowdown((_LARGEST_LOG_BYTES, log_channels))
    passes = min(large_slowdown, speeds.batch_norm_passes["backward" if backward else "forward"])
    count, measured_count = speeds.multiprocessors
    rounds = max(1.0, 2**log_channels / count) / max(1.0, 2**log_channels / measured_count)
    scale = speeds.clock_scale * rounds
    busy = table.slowdown((log_bytes + log(scale / speeds.memory_scale, 2), log_channels))
    memory_s = least_s * max(slowdown - large_slowdown + passes, passes)
    return max(memory_s, least_s / speeds.memory_scale * scale * busy, table.shortest_s)


# ---- tables from measured operators


def _shape_tables(
    rows: tuple[OperatorTime, ...], by_dtype: dict[Dtype, float], bandwidth: float
) -> dict[_TableKey, ShapeTable]:
    grouped: dict[_TableKey, list[tuple[tuple[float, ...], float, float]]] = {}
    for row in rows:
        name, sizes = classify_measurement(row)
        least_s = max(row.flops / by_dtype[row.dtype], row.bytes / bandwidth) if row.dtype in by_dtype else 0.0
        if least_s:
            key = (name, row.direction, row.dtype, row.layout)
            grouped.setdefault(key, []).append((sizes, log(row.seconds / least_s), row.seconds))
    return {key: _shape_table(sorted(points)) for key, points in grouped.items()}


@lru_cache(maxsize=1)
def _reference_batch_norm_passes() -> dict[str, float]:
    """For each direction, how many times the reference GPU's memory moves the bytes of a BatchNorm: the smallest
    slowdown of all large ones that were measured."""
    reference, _ = reference_gpu()
    passes: dict[str, float] = {}
    for row in reference.operators:
        if row.bytes >= _LARGE_BYTES and classify_measurement(row)[0] == "batch_norm":
            slowdown = row.seconds * reference.bandwidth_bytes_per_s / row.bytes
            passes[row.direction] = min(passes.get(row.direction, slowdown), slowdown)
    return passes


def _shape_table(points: list[tuple[tuple[float, ...], float, float]]) -> ShapeTable:
    """The table of measured points, each with its sizes, the logarithm of its slowdown, and its seconds."""
    return ShapeTable(
        np.array([s for s, _, _ in points]), np.array([v for _, v, _ in points]), min(t for *_, t in points)
    )


def shape_tables(device: Device) -> dict[_TableKey, ShapeTable]:
    """The measured shapes of a device, by class, direction, dtype and layout."""
    rows, rates, bandwidth = device.operators, device.rates, device.bandwidth_bytes_per_s
    return _TABLES.get(rows, (tuple(rates.items()), bandwidth), lambda: _shape_tables(rows, rates, bandwidth))


@lru_cache(maxsize=1)
def reference_gpu() -> tuple[Device, Device]:
    """The GPU whose measured operators are used for GPUs without a calibration, twice: with measured constants and
    operators, and with the constants of its datasheet."""
    rows = [json.loads(line) for line in REFERENCE_OPERATORS.read_text().splitlines()]
    raw = {**read_mapping(REFERENCE, "device"), "operators": rows}
    measured = validate(Device, raw, str(REFERENCE))
    return measured, find_entry(measured.name).device
