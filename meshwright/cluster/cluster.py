"""`Cluster`: what there is to train on. Devices and links as frozen values, each constant with its source.

Units are bytes, seconds and operations a second. A constant of 0 is one that nobody has measured or looked up: only
clusters that are `detected` have such ones, which is enough to start ranks on and too little to predict with.
"""

from collections.abc import Iterator
from typing import Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from meshwright.dtypes import Dtype

Kind = Literal["cpu", "cuda"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point"]
Operator = Literal[
    "matmul",
    "input_gradient",
    "weight_gradient",
    "batched_matmul",
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
Layout = Literal["contiguous", "channels_last"]
BasedOn = Literal["measured", "measured here, with the model's own shapes", "calibrated", "datasheet", "detected"]

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_yaml(self) -> str:
        """What the loader of this kind of file reads back as an equal value."""
        raw = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


class OperatorTime(_Value):
    """One operator as it was measured. `shape` by operator: matmul m n k (of a linear layer); input_gradient and
    weight_gradient m n k (products whose second operand, or both, lie with the inner side apart); batched_matmul b
    m n k; attention batch heads sequence head_dim (causal); convolution n c_in h w c_out kernel stride groups; norm
    rows columns (LayerNorm), or n c h w (BatchNorm); pooling (2 × 2 maxima) and bias (of a convolution) n c h w;
    softmax, log_softmax, loss and reduction rows columns; elementwise (ReLU), gelu, dropout (a GPU's, with a mask
    of bytes), widen (16 bits to 32) and copy (transposing) elements; embedding rows columns lookups; optimizer
    tensors elements and states (2 of AdamW, 1 of SGD with momentum; all tensors at once).
    Seconds are those that the device is busy; what its host takes to start an operator is `launch_s`.
    """

    operator: Operator
    direction: Literal["forward", "backward"] = "forward"
    dtype: Dtype
    shape: tuple[PositiveInt, ...]
    layout: Layout = "contiguous"
    flops: NonNegativeFloat
    bytes: PositiveFloat
    seconds: PositiveFloat


class Device(_Value):
    """One GPU, or one CPU core: a rank that has several cores has as many such devices' rates.

    `rates` are dense peaks; `launch_s` is what the host takes for one operator; `instructions` end in
    the dtype they speed up (`tensor-bf16`, `amx-bf16`); `context_bytes` is what a process takes before any tensor;
    `multiprocessors` run a GPU's blocks of threads, at most `clock_hz` fast.
    The memory and bandwidth of a CPU device are its share of the machine's. `sources` says where each constant
    comes from, by field, or by `rates.bf16` for one of several.
    """

    name: str
    kind: Kind
    memory_bytes: NonNegativeInt = 0
    bandwidth_bytes_per_s: NonNegativeFloat = 0
    rates: dict[Dtype, PositiveFloat] = {}
    multiprocessors: NonNegativeInt = 0
    clock_hz: NonNegativeFloat = 0
    launch_s: NonNegativeFloat = 0
    instructions: tuple[str, ...] = ()
    context_bytes: NonNegativeInt = 0
    operators: tuple[OperatorTime, ...] = ()
    sources: dict[str, str] = {}

    @property
    def is_known(self) -> bool:
        """Whether there is enough to predict with."""
        return bool(self.memory_bytes and self.bandwidth_bytes_per_s and "fp32" in self.rates)

    def accelerates(self, dtype: Dtype) -> bool:
        """Whether there are instructions for this dtype, so that it is more than a way to save memory."""
        return any(instruction.endswith(f"-{dtype}") for instruction in self.instructions)


class Curve(_Value):
    """Measured times of one collective, over the size of the whole tensor, for so many ranks on so many nodes."""

    ranks: int = Field(ge=2)
    nodes: PositiveInt = 1
    points: tuple[tuple[PositiveInt, PositiveFloat], ...]  # (bytes, seconds)
    source: str

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if not self.points:
            raise ValueError("points is empty: a curve has one or more")
        for (small, sooner), (large, later) in zip(self.points, self.points[1:], strict=False):
            if small >= large or sooner > later:
                raise ValueError(
                    f"a curve's points rise in bytes and in seconds, but ({small}, {sooner:g}) comes before"
                    f" ({large}, {later:g})"
                )
        return self


class Link(_Value):
    """One tier: `bandwidth_bytes_per_s` per device and direction, `latency_s` of a message too small to matter."""

    name: str
    bandwidth_bytes_per_s: NonNegativeFloat = 0
    latency_s: NonNegativeFloat = 0
    curves: dict[Collective, tuple[Curve, ...]] = {}
    sources: dict[str, str] = {}

    @model_validator(mode="after")
    def _one_curve_for_one_shape(self) -> Self:
        for collective, curves in self.curves.items():
            shapes = [(curve.ranks, curve.nodes) for curve in curves]
            twice = next((shape for shape in shapes if shapes.count(shape) > 1), None)
            if twice:
                raise ValueError(f"link '{self.name}' has two {collective} curves for {twice[0]} ranks on {twice[1]}")
        return self


class Node(_Value):
    """`number` equal machines, each with `count` devices joined by `link`, and CPU `cores` that their ranks share."""

    device: Device
    count: PositiveInt
    link: Link
    cores: PositiveInt
    number: PositiveInt = 1


class Cluster(_Value):
    """Nodes, which may differ, and the link between them. The price is that of the whole cluster."""

    name: str
    nodes: tuple[Node, ...]
    link: Link | None = None
    based_on: BasedOn = "datasheet"
    price_per_hour: PositiveFloat | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.nodes:
            raise ValueError("nodes is empty: a cluster has one or more")
        kinds = sorted({node.device.kind for node in self.nodes})
        if len(kinds) > 1:
            raise ValueError(f"nodes mix devices of kind {' and '.join(kinds)}: a plan runs on one kind")
        if sum(node.number for node in self.nodes) > 1 and self.link is None:
            raise ValueError("link is missing: several nodes need one between them, such as InfiniBand-HDR")
        if self.based_on != "detected":
            for message in self._unknown():
                raise ValueError(message)
        return self

    def _unknown(self) -> Iterator[str]:
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
    def devices(self) -> int:
        """How many ranks can run at once."""
        return sum(node.count * node.number for node in self.nodes)

    @property
    def kind(self) -> Kind:
        return self.nodes[0].device.kind

    @property
    def cores(self) -> int:
        """The CPU cores that the ranks of one machine share, on the machine that has fewest."""
        return min(node.cores for node in self.nodes)

    def with_devices(self, devices: int) -> Self:
        """The first node's devices in another number, on one machine."""
        node = self.nodes[0].model_copy(update={"count": devices, "number": 1})
        return self.model_copy(update={"nodes": (node,)})
