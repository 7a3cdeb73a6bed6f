"""How long one operator keeps a device busy: the least its shape allows, times how much longer such shapes took.

    least    = max(FLOPs / rate of the dtype, bytes / bandwidth)                                    operator_s
    class    = what it was measured as, and the sizes that decide how fast it is                    lookup.looked_up
    slowdown = measured / least, interpolated between the measured shapes around it                 Table.slowdown
    seconds  = max(least × slowdown, the shortest that was measured) + that of a convolution's bias operator_s

Shapes come from the device's own calibration (`doctor --calibrate`; of a CPU core, whatever measures this machine). A
GPU without one is taken to be like the reference GPU: an operator that its peak rate would finish in the same time is
slowed down as much there, so sizes are scaled by the ratio of the rates before they are looked up (of what only moves
bytes, by that of the memories), and datasheet peaks by what the reference reaches of its own, or by what is published
of the GPU (rates_reached.yaml). A BatchNorm of contiguous images waits for multiprocessors or for memory, whichever is
slower on the GPU (`_by_channels_s`), and so do dropout, GELU and casts to wider types (`_computed_s`). Batched products
with a side whose rows are no multiple of what a load takes are slower by as much as plain ones (`_odd`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from meshwright.cluster.catalog import CATALOG, find_entry
from meshwright.cluster.cluster import Device, OperatorTime
from meshwright.cluster.file import load_device
from meshwright.dtypes import Dtype
from meshwright.profile.values import Operator
from meshwright.simulator.compute.lookup import (
    STAND_INS,
    LookedUp,
    as_product,
    bias_of,
    looked_up,
    measured_as,
    stacked,
)
from meshwright.simulator.compute.shape_table import Table
from meshwright.yaml_file import read_mapping

REFERENCE: Path = CATALOG / "reference_gpu.yaml"
REACHED = Path(__file__).with_name("rates_reached.yaml")
_DTYPES: dict[str, Dtype] = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_AT_THE_LIMIT: tuple[Dtype, ...] = ("bf16", "fp16")  # of a GPU's power
_PRODUCTS = ("matmul", "convolution", "attention")
_LIKE = {"fp16": ("fp16", "bf16", "fp32"), "bf16": ("bf16", "fp16", "fp32"), "tf32": ("tf32", "fp32")}
_ARRANGED = ("convolution", "batch_norm", "pooling", "bias")  # that read images, and care how they lie
# Those that are slower than others that move as many bytes, as they wait for arithmetic in fp32, or for what a
# multiprocessor of any generation does as often in a cycle: products of integers (they draw numbers), loads and stores.
_BY_VECTORS, _BY_CYCLES = ("gelu",), ("dropout", "widen")
_LARGE_BYTES = 1e8  # from here on what starting takes does not count
_LARGEST = 99.0  # the logarithm of more bytes than any operator moves
_Key = tuple[str, str, str, str]  # operator, direction, dtype, layout


@dataclass(frozen=True)
class Speeds:
    """What operators are priced with. `scale` and `memory` are how many times slower the device and its memory are
    than those in the tables, `clock` its clock and `vector` its arithmetic in fp32 outside of products;
    `multiprocessors` are its own and those of the one in the tables, 0 if nobody told; `passes`: by direction, how
    often memory moves what a BatchNorm reads and writes; `fp32_first`: its library's convolutions in fp32 are at their
    best, unlike those of the one in the tables; `tf32_images`: convolutions of fp32 take tf32."""

    rates: Mapping[str, float]
    bandwidth_bytes_per_s: float
    tables: dict[_Key, Table]
    scale: float
    layout: str = "contiguous"
    memory: float = 1.0
    fp32_first: bool = False
    clock: float = 1.0
    vector: float = 1.0
    multiprocessors: tuple[int, int] = (0, 0)
    passes: Mapping[str, float] = field(default_factory=dict)
    tf32_images: bool = False

    def table(self, name: str, direction: str, dtype: str) -> Table | None:
        """That of the dtype, or of the one that is most like it; forward where backward was not measured apart."""
        found = self._table(name, direction, dtype)
        return found or (self._table(STAND_INS[name], direction, dtype) if name in STAND_INS else None)

    def _table(self, name: str, direction: str, dtype: str) -> Table | None:
        layouts = (self.layout, "contiguous") if name in _ARRANGED else ("contiguous",)
        for way in (direction, "forward"):
            for kind in _LIKE.get(dtype, ("fp32", "bf16")):
                for arranged in layouts:
                    if (key := (name, way, kind, arranged)) in self.tables:
                        return self.tables[key]
        return None


def speeds(
    device: Device, dtype: Dtype, cores: int = 1, layout: str = "contiguous", tf32_images: bool = False
) -> Speeds:
    """Of a device that computes its products in `dtype`; of a CPU rank that has so many cores."""
    rates: dict[str, float] = {name: rate * cores for name, rate in device.rates.items()}
    bandwidth = device.bandwidth_bytes_per_s * cores
    if device.operators:
        return Speeds(rates, bandwidth, tables(device), 1.0, layout, tf32_images=tf32_images)
    if device.kind == "cpu":
        return Speeds(rates, bandwidth, {}, 1.0, layout)
    reference, datasheet = reference_gpu()
    known: dict[str, float] = {str(name): rate for name, rate in reference.rates.items()}
    printed: dict[str, float] = {str(name): rate for name, rate in datasheet.rates.items()}
    reached = {
        name: rate * (1.0 if _is_measured(device, "rates") else known[name] / printed[name])
        for name, rate in rates.items()
        if name in known and name in printed
    }
    if not _is_measured(device, "bandwidth_bytes_per_s"):
        bandwidth *= reference.bandwidth_bytes_per_s / datasheet.bandwidth_bytes_per_s
    used = dtype if dtype in reached else "fp32"
    return Speeds(
        {**rates, **reached, **({} if _is_measured(device, "rates") else _published(device))},
        bandwidth,
        _as_they_lie(tables(reference), device),
        known[used] / reached[used],
        layout,
        reference.bandwidth_bytes_per_s / bandwidth,
        fp32_first="tf32" not in rates,
        clock=datasheet.clock_hz / device.clock_hz if device.clock_hz else 1.0,
        vector=printed["fp32"] / rates["fp32"],
        multiprocessors=(device.multiprocessors, datasheet.multiprocessors),
        passes=_passes(),
        tf32_images=tf32_images,
    )


def _as_they_lie(found: dict[_Key, Table], device: Device) -> dict[_Key, Table]:
    """Those of the reference, but for a weakness of its kind alone."""
    if device.name in _shares()["tf32_inner_together"]:
        return found
    plain = found[_key("matmul")]
    return {**found, _key("input_gradient"): plain, _key("weight_gradient"): plain}


def _key(name: str) -> _Key:
    return name, "forward", "tf32", "contiguous"


@lru_cache(maxsize=1)
def _shares() -> dict[str, Any]:
    return read_mapping(REACHED, "rates reached")


def _published(device: Device) -> dict[str, float]:
    """The rates of which it is published what the device reaches. `sources` may name a publisher to do without."""
    told = _shares()["tensor_cores"].get(device.name)
    by = told if isinstance(told, dict) else {"": told} if told else {}
    shares = [value for publisher, value in by.items() if publisher != device.sources.get("without")]
    share = geometric_mean(shares) if shares else 0.0
    found = {name: share * device.rates[name] for name in _AT_THE_LIMIT if share and name in device.rates}
    if "tf32" not in device.rates:
        before = _shares()["fp32_before_tf32"]
        found["fp32"] = before.get(device.name, before["others"]) * device.rates["fp32"]
    return {str(name): rate for name, rate in found.items()}


def _is_measured(device: Device, field: str) -> bool:
    """What was measured is what the device reaches; a datasheet's figure it only comes near."""
    return device.sources.get(field, "").startswith("measured")


def operator_s(operator: Operator, batch: float, speeds: Speeds, backward: bool, tf32: bool = False) -> float:
    """Seconds that the device is busy with it."""
    dtype = _DTYPES.get(operator.dtype, "fp32")
    shorter = _PRODUCTS if tf32 else ("convolution",) if speeds.tf32_images else ()
    used = "tf32" if dtype == "fp32" and operator.kind in shorter and "tf32" in speeds.rates else dtype
    if speeds.fp32_first and operator.kind in _PRODUCTS and speeds.rates.get(used, 0.0) <= 1.1 * speeds.rates["fp32"]:
        used = "fp32"  # a type that the device stores and does not compute in
    found = looked_up(operator, batch, speeds.scale, backward, speeds.memory)
    if found is None:
        return 0.0
    rate = speeds.rates.get(used) or speeds.rates["fp32"]
    least = max(found.flops / rate, found.bytes / speeds.bandwidth_bytes_per_s)
    table = speeds.table(found.name, "backward" if backward else "forward", used)
    slowdown = table.slowdown(found.sizes) if table else 1.0
    if found.name == "convolution" and used == "fp32" and speeds.fp32_first:
        slowdown = min(slowdown, _at_its_best(operator, found, batch, speeds))
    if found.name == "batched_matmul":
        slowdown *= _odd(operator, batch, speeds, used)
    if table and found.name == "batch_norm" and speeds.layout == "contiguous" and all(speeds.multiprocessors):
        taken = _by_channels_s(found, table, speeds, backward)
    elif table and found.name in (*_BY_VECTORS, *_BY_CYCLES):
        taken = _computed_s(found, table, speeds, used, backward)
    else:
        taken = max(least * slowdown, table.shortest_s) if table and least else least
    if operator.kind == "convolution" and (size := bias_of(operator, batch, backward)):
        taken += moved_s("bias", size, used, speeds, backward)
    return taken


def _at_its_best(operator: Operator, found: LookedUp, batch: float, speeds: Speeds) -> float:
    """Of a convolution in fp32, where TF32 is not to be had and libraries took care of it: as the reference's in the
    pass that it chooses well for (Winograd's algorithm, up to twice what its products reach), or as a product. Its
    own choice in the forward pass is a neglected one, at half of what its products reach."""
    ways: list[tuple[Table | None, LookedUp | None]] = [
        (speeds.table("convolution", "forward", "fp32"), found),
        (speeds.table("convolution", "backward", "fp32"), found),
        (speeds.table("matmul", "forward", "fp32"), as_product(operator, found, batch, speeds.scale)),
    ]
    return min(table.slowdown(one.sizes) for table, one in ways if table and one)


def _odd(operator: Operator, batch: float, speeds: Speeds, dtype: str) -> float:
    """How many times longer batched products take whose sides tensor cores do not like: as many as one product of all
    their rows. Batched ones were measured with sides that they like alone."""
    name, sizes = stacked(operator, batch, speeds.scale)
    liked, odd = speeds.table("matmul", "forward", dtype), speeds.table(name, "forward", dtype)
    return max(1.0, odd.slowdown(sizes) / liked.slowdown(sizes)) if liked and odd and name != "matmul" else 1.0


def moved_s(name: str, size: float, dtype: str, speeds: Speeds, backward: bool) -> float:
    """Of something that only moves so many bytes; nothing where it was not measured, as it takes no time of its own."""
    table = speeds.table(name, "backward" if backward else "forward", dtype)
    if table is None:
        return 0.0
    least = size / speeds.bandwidth_bytes_per_s
    return max(least * table.slowdown((log(size * speeds.memory, 2),)), table.shortest_s)


def _computed_s(found: LookedUp, table: Table, speeds: Speeds, dtype: str, backward: bool) -> float:
    """Of something that computes much for each number: as long as memory takes for what only moves as many bytes, or as
    long as in the tables, but for the device's arithmetic, or its multiprocessors and their clock."""
    plain = speeds.table("elementwise", "backward" if backward else "forward", dtype) or table
    slowdown, least = table.slowdown(found.sizes), found.bytes / speeds.bandwidth_bytes_per_s
    mine, measured = speeds.multiprocessors
    more = speeds.clock * measured / mine if mine and found.name in _BY_CYCLES else speeds.vector
    moved = least * min(slowdown, plain.slowdown(found.sizes))
    return max(moved, least / speeds.memory * slowdown * more, table.shortest_s)


def _by_channels_s(found: LookedUp, table: Table, speeds: Speeds, backward: bool) -> float:
    """Of a BatchNorm of contiguous images, on a GPU that is like the measured one. A block of threads has a channel, so
    64 channels keep 64 multiprocessors busy, of however many, and memory waits for them: the tables have 12 times what
    memory takes. Another GPU's multiprocessors take as long, but for their clock, and longer where channels outnumber
    them; its memory takes what was least for the same bytes."""
    least = found.bytes / speeds.bandwidth_bytes_per_s
    slowdown, large = table.slowdown(found.sizes), table.slowdown((_LARGEST, found.sizes[1]))
    passes = min(large, speeds.passes["backward" if backward else "forward"])
    mine, measured = speeds.multiprocessors
    rounds = max(1.0, 2 ** found.sizes[1] / mine) / max(1.0, 2 ** found.sizes[1] / measured)
    more = speeds.clock * rounds
    busy = table.slowdown((found.sizes[0] + log(more / speeds.memory, 2), found.sizes[1]))
    return max(least * max(slowdown - large + passes, passes), least / speeds.memory * more * busy, table.shortest_s)


# ---- tables from measured operators


@lru_cache(maxsize=8)
def _tables(
    rows: tuple[OperatorTime, ...], rates: tuple[tuple[str, float], ...], bandwidth: float
) -> dict[_Key, Table]:
    grouped: dict[_Key, list[tuple[tuple[float, ...], float, float]]] = {}
    by_dtype = dict(rates)
    for row in rows:
        name, sizes = measured_as(row)
        least = max(row.flops / by_dtype[row.dtype], row.bytes / bandwidth) if row.dtype in by_dtype else 0.0
        if least:
            key = (name, row.direction, row.dtype, row.layout)
            grouped.setdefault(key, []).append((sizes, log(row.seconds / least), row.seconds))
    return {key: _table(sorted(found)) for key, found in grouped.items()}


@lru_cache(maxsize=1)
def _passes() -> dict[str, float]:
    """By direction, how many times over the reference's memory moves the bytes of a BatchNorm, at most: as of the large
    one that is slowed down least."""
    reference, _ = reference_gpu()
    found: dict[str, float] = {}
    for row in reference.operators:
        if row.bytes >= _LARGE_BYTES and measured_as(row)[0] == "batch_norm":
            slowdown = row.seconds * reference.bandwidth_bytes_per_s / row.bytes
            found[row.direction] = min(found.get(row.direction, slowdown), slowdown)
    return found


def _table(found: list[tuple[tuple[float, ...], float, float]]) -> Table:
    return Table(np.array([s for s, _, _ in found]), np.array([v for _, v, _ in found]), min(t for *_, t in found))


def tables(device: Device) -> dict[_Key, Table]:
    return _tables(device.operators, tuple(device.rates.items()), device.bandwidth_bytes_per_s)


@lru_cache(maxsize=1)
def reference_gpu() -> tuple[Device, Device]:
    """The GPU that others are taken to be like, as it was measured and as its datasheet has it."""
    measured = load_device(REFERENCE)
    return measured, find_entry(measured.name).device
