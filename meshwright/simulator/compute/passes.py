"""How long a rank computes: the operators of a profile, one after another, behind a host that has to start each.

busy    = sum over operators of operator_s                                                      pass_s
started = operators × launch_s: a GPU cannot be done before its host has started the last one   pass_s
seconds = max(busy, started), over both passes of a microbatch together                         microbatch_s
optimizer step = bytes it moves / bandwidth, times how much longer multi-tensor steps took; of one that takes a GPU's
          tensors one after another, the longer of what its operators move and what starting them takes  optimizer_s
"""

from dataclasses import dataclass
from math import log2

from meshwright.cluster.cluster import Device
from meshwright.dtypes import Dtype
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile, Phase, Stretch
from meshwright.simulator.compute.operator_time import Speeds, moved_s, operator_s, reference_gpu, speeds

# Of the host, in operators, measured beside the reference GPU with a row of small layers: a cast of autocast, which no
# line of Python asks for; what our own step does beside its passes, starting an optimizer of all tensors at once
# included; and what each tensor of it adds. And without gradients, an operator of an optimizer that takes tensors one
# after another (AdamW, RMSprop, SGD and one of twelve lines: each 0.34, of 26 to 32 µs).
_CAST = 0.4
_BESIDES = 14.0
_LOOKED_AT = 0.11
_WITHOUT_GRADIENTS = 0.34


@dataclass(frozen=True)
class Passes:
    """Seconds of one microbatch: what the device is busy, and what its host makes it wait for beyond that."""

    forward_s: float
    backward_s: float
    waiting_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.waiting_s


def products_in(precision: str) -> Dtype:
    """The type that a plan's precision computes its products in."""
    types: dict[str, Dtype] = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16"}
    return types[precision]


def microbatch_s(profile: ModelProfile, batch: float, device: Device, speeds: Speeds) -> Passes:
    """Both passes of `batch` samples."""
    tf32 = profile.precision == "tf32"
    forward, begun = pass_s(profile, "forward", batch, speeds, tf32)
    backward, more = pass_s(profile, "backward", batch, speeds, tf32)
    started = (begun + more) * host_s(device) if device.kind == "cuda" else 0.0
    return Passes(forward, backward, max(0.0, started - forward - backward))


def host_s(device: Device) -> float:
    """What the host takes for one operator; where nobody has measured it, as long as the reference GPU's."""
    return device.launch_s if device.operators else reference_gpu()[0].launch_s


def pass_s(profile: ModelProfile, phase: Phase, batch: float, speeds: Speeds, tf32: bool) -> tuple[float, float]:
    """Seconds that the device is busy, and how many operators its host starts, with what else it does in a step."""
    busy, operators = 0.0, 0.0
    if phase == "forward":
        operators += _BESIDES + _LOOKED_AT * len(profile.parameters)
    for stretch in profile.stretches:
        if stretch.phase == phase:
            busy += stretch.count * _stretch_s(stretch, batch, speeds, tf32)
            operators += stretch.count * sum(_CAST if o.name == "_to_copy" else 1.0 for o in stretch.operators)
    return busy, operators


def _stretch_s(stretch: Stretch, batch: float, speeds: Speeds, tf32: bool) -> float:
    backward = stretch.phase == "backward"
    return sum(operator_s(operator, batch, speeds, backward, tf32) for operator in stretch.operators)


def piece_seconds(
    profile: ModelProfile, batch: float, device: Device, precision: str, cores: int = 1
) -> dict[str, tuple[float, float]]:
    """By piece of the model's structure, the seconds of its passes; what runs between pieces counts with the piece
    before it."""
    assert profile.structure is not None
    prices, tf32 = speeds(device, products_in(precision), cores), profile.precision == "tf32"
    pieces = profile.structure.pieces
    found = {piece: [0.0, 0.0] for piece in pieces}
    for stretch in profile.stretches:
        side = int(stretch.phase == "backward")
        here = pieces[0] if stretch.phase == "forward" else pieces[-1]
        for block in stretch.blocks or ("",):
            for operator in stretch.operators:
                layer = block + operator.layer[len(stretch.unit) :] if block else operator.layer
                here = _piece_of(layer, found, here)
                found[here][side] += operator_s(operator, batch, prices, bool(side), tf32)
    return {piece: (forward, backward) for piece, (forward, backward) in found.items()}


def _piece_of(layer: str, pieces: dict[str, list[float]], otherwise: str) -> str:
    while layer:
        if layer in pieces:
            return layer
        layer = layer.rpartition(".")[0]
    return otherwise


def optimizer_s(
    weights_bytes: float,
    tensors: int,
    optimizer: OptimizerCost,
    device: Device,
    prices: Speeds,
    launch: float = 1.0,
) -> float:
    """The step of one rank's share of the parameters. Starting one of all tensors at once counts with the passes;
    `launch`: how many times longer the host takes than a known one."""
    if not weights_bytes:
        return 0.0
    if device.kind == "cuda" and optimizer.operators:
        operators, moved = optimizer.operators * tensors, weights_bytes * optimizer.moved
        busy = operators * moved_s("elementwise", moved / operators, "fp32", prices, backward=False)
        started = launch * host_s(device) * _WITHOUT_GRADIENTS * operators if optimizer.waits else 0.0
        return max(busy, started, moved / prices.bandwidth_bytes_per_s)
    started = 0.0 if optimizer.at_once else host_s(device) * 5 * tensors
    moved = weights_bytes * (3 + 2 * optimizer.state)
    # What is measured takes several passes over all tensors, one an operation; a fused step takes one.
    fused = optimizer.state >= 2 and not optimizer.temporary
    table = None if fused or not optimizer.state else prices.table(_measured(optimizer), "forward", "fp32")
    slowdown = table.slowdown((log2(moved * prices.memory),)) if table else 1.0
    return max(moved / prices.bandwidth_bytes_per_s * slowdown, started)


def _measured(optimizer: OptimizerCost) -> str:
    return "optimizer 2" if optimizer.state > 1 else "optimizer 1"
