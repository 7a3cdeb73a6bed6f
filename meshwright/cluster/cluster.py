"""`Cluster`: the devices and links to train on, as frozen values. Each constant carries its source.

Units are bytes, seconds and operations per second. A constant of 0 is unknown. The memory, bandwidths and fp32 rate
that every prediction needs are known, except in clusters that were only detected (`based_on: detected`): ranks can be
started on those, but nothing can be predicted for them.
"""

from collections.abc import Iterator
from typing import Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from meshwright.dtypes import Dtype
from meshwright.numbers.limits import (
    MOST_DEVICES,
    BusyCores,
    Bytes,
    BytesPerSecond,
    Cores,
    Devices,
    Hertz,
    Latency,
    MeasuredSeconds,
    MemoryBytes,
    MessageBytes,
    MultiprocessorsOrZero,
    Operations,
    OperationsPerSecond,
    Price,
    SeveralRanks,
    Share,
    TensorSize,
)

DeviceKind = Literal["cpu", "cuda"]
Platform = Literal["cuda", "rocm", "gaudi", "mps"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point"]
MeasuredOperator = Literal[
    "matmul",
    "input_gradient",
    "weight_gradient",
    "batched_matmul",
    "grouped_matmul",
    "attention",
    "convolution",
    "norm",
    "pooling",
    "bias",
    "softmax",
    "log_softmax",
    "loss",
    "reduction",
    "elementwise",
    "gelu",
    "dropout",
    "widen",
    "copy",
    "embedding",
    "optimizer",
]
MemoryLayout = Literal["contiguous", "channels_last"]
ImageKernels = Literal["contiguous", "channels_last", "nnpack"]  # `compute.image_kernels` of a plan
BasedOn = Literal["measured", "measured here, with the model's own shapes", "calibrated", "datasheet", "detected"]

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class _FrozenValue(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_yaml(self) -> str:
        """Returns the YAML from which `cluster/file.py` reads an equal value."""
        raw = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


# How many numbers the shape of an operator has if its time is looked up by shape. The others are looked up by bytes.
_SHAPE_SIZES: dict[str, int] = {
    **dict.fromkeys(("matmul", "input_gradient", "weight_gradient", "optimizer"), 3),
    **dict.fromkeys(("batched_matmul", "grouped_matmul", "attention"), 4),
    "convolution": 8,
}


class OperatorTime(_FrozenValue):
    """The measured time of one operator and shape. `seconds` is how long the device is busy; the time that the host
    needs to launch the operator is not part of it (`Device.launch_s`). The meaning of `shape` depends on the operator:

    matmul                              m n k, of a linear layer
    input_gradient, weight_gradient     m n k, of products whose second operand, or both, are not contiguous along k
    batched_matmul                      batch m n k
    grouped_matmul                      groups m n k, of m rows in groups of equal size, each with a matrix of its own
    attention                           batch heads sequence head_dim, causal
    convolution                         n c_in h w c_out kernel stride groups
    norm                                rows columns (LayerNorm), or n c h w (BatchNorm)
    pooling, bias                       n c h w, of a 2 × 2 maximum, of the bias of a convolution
    softmax, log_softmax, loss          rows columns
    reduction                           rows columns
    elementwise, gelu, dropout          elements, of a ReLU, of a GELU, of a GPU's dropout with a mask of bytes
    widen, copy                         elements, of a cast from 16 to 32 bits, of a transposing copy
    embedding                           rows columns lookups
    optimizer                           tensors elements states, all tensors in one step; AdamW has 2 states, SGD with
                                        momentum 1
    """

    operator: MeasuredOperator
    direction: Literal["forward", "backward"] = "forward"
    dtype: Dtype
    shape: tuple[TensorSize, ...]
    layout: ImageKernels = "contiguous"
    flops: Operations
    bytes: Bytes
    seconds: MeasuredSeconds

    @model_validator(mode="after")
    def _shape_is_that_of_the_operator(self) -> Self:
        size = _SHAPE_SIZES.get(self.operator, len(self.shape))
        if len(self.shape) != size:
            raise ValueError(f"the shape of {self.operator} has {size} numbers, not {len(self.shape)}")
        return self


class Device(_FrozenValue):
    """One GPU, or one CPU core. A rank with several cores has the rates of that number of devices.

    `rates` are the operations per second of dense matrix products: the datasheet's peak, or measured. `launch_s` is the
    time that the host needs to launch one operator. `instructions` end in the dtype that they speed up (`tensor-bf16`,
    `amx-bf16`). `context_bytes` is the memory that a process takes before it creates any tensor. A GPU has
    `multiprocessors`, which run at `clock_hz` at most. `operators` are the measured operators, empty if there are none.
    `sustained_shares` maps a dtype, then a publisher, to the share of the rate that matrix products reach during
    training. `host_bandwidth_bytes_per_s` is that of copies between a GPU and page-locked CPU memory, in one direction;
    0 if it is not known. With `tf32_needs_inner_contiguous`, products in tf32 are slower unless both operands are
    contiguous along the dimension that is summed over.
    `platform` is how PyTorch uses a GPU; on others than cuda nothing of Meshwright has been run, and only plans are
    made for them.
    The memory and bandwidth of a CPU device are its share of the machine's memory and bandwidth. `sources` says where
    each constant comes from; its keys are the names of fields, or `rates.bf16` for the rate of one dtype.
    """

    name: str
    kind: DeviceKind
    platform: Platform = "cuda"
    memory_bytes: MemoryBytes = 0
    bandwidth_bytes_per_s: BytesPerSecond = 0
    rates: dict[Dtype, OperationsPerSecond] = {}
    multiprocessors: MultiprocessorsOrZero = 0
    clock_hz: Hertz = 0
    sustained_shares: dict[Dtype, dict[str, Share]] = {}
    tf32_needs_inner_contiguous: bool = False
    launch_s: Latency = 0
    instructions: tuple[str, ...] = ()
    context_bytes: MemoryBytes = 0
    host_bandwidth_bytes_per_s: BytesPerSecond = 0
    operators: tuple[OperatorTime, ...] = ()
    sources: dict[str, str] = {}

    @property
    def is_known(self) -> bool:
        """Whether all constants that a prediction needs are known."""
        return bool(self.memory_bytes and self.bandwidth_bytes_per_s and "fp32" in self.rates)

    def accelerates(self, dtype: Dtype) -> bool:
        """Whether the device has instructions that compute faster in this dtype. Without them the dtype only saves
        memory."""
        return any(instruction.endswith(f"-{dtype}") for instruction in self.instructions)

    @property
    def has_graphs(self) -> bool:
        """Whether work of the device can be captured as a CUDA graph, which torch has for GPUs of NVIDIA and AMD."""
        return self.kind == "cuda" and self.platform in ("cuda", "rocm")


class Curve(_FrozenValue):
    """Measured times of one collective for several sizes of the whole tensor, on one number of ranks and nodes."""

    ranks: SeveralRanks
    nodes: Devices = 1
    points: tuple[tuple[MessageBytes, MeasuredSeconds], ...]  # (bytes, seconds)
    source: str

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if not self.points:
            raise ValueError("points is empty: a curve has one or more")
        for (small, small_s), (large, large_s) in zip(self.points, self.points[1:], strict=False):
            if small >= large or small_s > large_s:
                raise ValueError(
                    f"a curve's points rise in bytes and in seconds, but ({small}, {small_s:g}) comes before"
                    f" ({large}, {large_s:g})"
                )
        return self


class Link(_FrozenValue):
    """The links between the devices of a node, or between nodes. `bandwidth_bytes_per_s` is per device and direction.
    `latency_s` is the time of a message so small that its size does not matter. `curves` are measured times of
    collectives."""

    name: str
    bandwidth_bytes_per_s: BytesPerSecond = 0
    latency_s: Latency = 0
    curves: dict[Collective, tuple[Curve, ...]] = {}
    sources: dict[str, str] = {}

    @model_validator(mode="after")
    def _one_curve_for_one_shape(self) -> Self:
        for collective, curves in self.curves.items():
            shapes = [(curve.ranks, curve.nodes) for curve in curves]
            repeated = next((shape for shape in shapes if shapes.count(shape) > 1), None)
            if repeated:
                ranks, nodes = repeated
                raise ValueError(f"link '{self.name}' has two {collective} curves for {ranks} ranks on {nodes} nodes")
        return self


class Node(_FrozenValue):
    """`number` equal machines. Each has `count` devices connected by `link`, and CPU `cores` that its ranks share.
    `host_memory_bytes` is the CPU memory of a machine with GPUs; None if it is not known."""

    device: Device
    count: Devices
    link: Link
    cores: Cores
    number: Devices = 1
    host_memory_bytes: MemoryBytes | None = None

    def is_alike(self, other: "Node") -> bool:
        """Whether a rank on this node is as fast as on the other, and has as much memory."""
        has_as_many_cores = self.device.kind != "cpu" or self.cores * other.count == other.cores * self.count
        return has_as_many_cores and (self.device is other.device or self.device == other.device)


class Cluster(_FrozenValue):
    """Nodes, which may differ, and the link between them (None for one node). `based_on` says where the constants come
    from, and `busy_cores` how many cores other programs used while they were measured; 0 if too few to matter.
    `price_per_hour` is the price of the whole cluster."""

    name: str
    nodes: tuple[Node, ...]
    link: Link | None = None
    based_on: BasedOn = "datasheet"
    busy_cores: BusyCores = 0
    price_per_hour: Price | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.nodes:
            raise ValueError("nodes is empty: a cluster has one or more")
        if self.device_count > MOST_DEVICES:
            raise ValueError(
                f"the nodes have {self.device_count:,} devices together: at most {MOST_DEVICES:,}, for which planning"
                " takes seconds"
            )
        kinds = sorted({node.device.kind for node in self.nodes})
        if len(kinds) > 1:
            raise ValueError(f"nodes mix devices of kind {' and '.join(kinds)}: a plan runs on one kind")
        platforms = {node.device.platform: node.device.name for node in self.nodes}
        if len(platforms) > 1:
            words = " and ".join(f"{platform} ({name})" for platform, name in platforms.items())
            raise ValueError(f"nodes mix devices of the platforms {words}, whose ranks cannot exchange tensors")
        if sum(node.number for node in self.nodes) > 1 and self.link is None:
            raise ValueError("link is missing: several nodes need one between them, such as InfiniBand-HDR")
        if self.based_on != "detected":
            for message in self._missing_constants():
                raise ValueError(message)
        return self

    def _missing_constants(self) -> Iterator[str]:
        for index, node in enumerate(self.nodes):
            if not node.device.is_known:
                yield (
                    f"nodes.{index}.device '{node.device.name}' needs memory_bytes, bandwidth_bytes_per_s and"
                    " rates.fp32 above zero"
                )
            if node.count > 1 and not node.link.bandwidth_bytes_per_s:
                yield f"nodes.{index}.link '{node.link.name}' needs a bandwidth_bytes_per_s above zero"
        if self.link is not None and not self.link.bandwidth_bytes_per_s:
            yield f"link '{self.link.name}' needs a bandwidth_bytes_per_s above zero"

    @property
    def device_count(self) -> int:
        """The number of devices on all nodes, each of which can run one rank."""
        return sum(node.count * node.number for node in self.nodes)

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks have equal devices and, on CPUs, equally many cores."""
        return all(node.is_alike(self.nodes[0]) for node in self.nodes[1:])

    @property
    def kinds(self) -> tuple[Node, ...]:
        """The first node of each kind of device."""
        kinds: list[Node] = []
        for node in self.nodes:
            if not any(node.is_alike(other) for other in kinds):
                kinds.append(node)
        return tuple(kinds)

    @property
    def kind(self) -> DeviceKind:
        return self.nodes[0].device.kind

    @property
    def cores(self) -> int:
        """The number of CPU cores that the ranks of one machine share, on the machine that has the fewest."""
        return min(node.cores for node in self.nodes)

    @property
    def basis(self) -> str:
        """`based_on`, with what other programs used meanwhile."""
        meanwhile = f", while other programs used {self.busy_cores:.2g} of {self.cores} cores"
        return f"{self.based_on}{meanwhile if self.busy_cores else ''}"

    def with_device_count(self, devices: int) -> Self:
        """Returns a cluster of one machine with this number of the first node's devices."""
        node = self.nodes[0].model_copy(update={"count": devices, "number": 1})
        return self.model_copy(update={"nodes": (node,)})
