"""`Headline`: the first line of an answer, in the figures that people compare.

samples per second = global batch / seconds of a step
tokens per second  = samples per second × tokens of a sample
MFU                = FLOPs of the model's step, without recomputation / (seconds of a step × rates of all devices)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.numbers.units import bytes_text, number_text, words_text
from meshwright.plan import Plan
from meshwright.planner.explanation.plain import PlainPlan
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.passes import product_dtype
from meshwright.simulator.predict import Prediction


@dataclass(frozen=True)
class Headline:
    """`tokens_per_s` is None for models without sequences, and `mfu` if the rate of a device in the plan's precision is
    not known. `memory_bytes` is what the plan needs of a device that has `device_memory_bytes`."""

    parameters: int
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float | None
    precision: str
    memory_bytes: float
    device: str
    device_memory_bytes: int
    plain: tuple[PlainPlan, ...] = ()

    def __str__(self) -> str:
        samples = f"{number_text(self.samples_per_s)} samples/s"
        speed = samples if self.tokens_per_s is None else f"{words_text(self.tokens_per_s)} tokens/s ({samples})"
        share = "less than 0.1%" if (self.mfu or 0.0) < 1e-3 else f"{self.mfu:.1%}"
        used = f"{share} of the peak rate in {self.precision} (MFU)"
        parts = [
            f"{words_text(self.parameters)} parameters",
            speed,
            *([used] if self.mfu is not None else []),
            f"{bytes_text(self.memory_bytes)} of the {bytes_text(self.device_memory_bytes)} of one {self.device}",
        ]
        compared = "; ".join(plain.words for plain in self.plain)
        return f"{', '.join(parts)}{f'; {compared}' if compared else ''}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
        }


def headline(
    plan: Plan, prediction: Prediction, inputs: PlanningInputs, profiles: Profiles, plain: Sequence[PlainPlan] = ()
) -> Headline:
    """Returns the first line about a plan. `plain` are the plans that it is compared with."""
    profile = profiles.get(plan.numerics.precision, "none")
    samples_per_s = inputs.global_batch / prediction.step_s
    tokens = tokens_per_sample(profile)
    rate = _rate(plan.numerics.precision, inputs)
    flops_per_s = profile.flops(inputs.global_batch) / prediction.step_s
    device = prediction.fullest_device or inputs.device
    return Headline(
        profile.parameter_count,
        samples_per_s,
        samples_per_s * tokens if tokens else None,
        flops_per_s / rate if rate else None,
        plan.numerics.precision,
        prediction.memory.device_bytes,
        device.name,
        device.memory_bytes,
        tuple(plain),
    )


def tokens_per_sample(profile: ModelProfile) -> int:
    """The tokens of a sample; 0 for models without sequences."""
    sequences = profile.structure.sequences if profile.structure is not None else ()
    return max((sequence.length for sequence in sequences), default=0)


def _rate(precision: str, inputs: PlanningInputs) -> float:
    """The FLOPs per second of all devices together, also of those that the plan does not use; 0 if a rate is not
    known."""
    total = 0.0
    for node in inputs.cluster.nodes:
        rates: dict[Any, float] = dict(node.device.rates)
        rate = rates.get(precision) or rates.get(product_dtype(precision), 0.0)
        devices = node.cores if node.device.kind == "cpu" else node.count  # the rates of a CPU are those of a core
        total += rate * devices * node.number
        if not rate:
            return 0.0
    return total
