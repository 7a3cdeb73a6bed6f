"""The profiles of one model, each traced when it is first needed. Tracing one of the largest models takes seconds, so a
search traces only the profiles that its bounds leave."""

from collections import Counter
from dataclasses import InitVar, dataclass, field
from typing import Any

from torch import nn

from meshwright.blocks.recompute import Recompute
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.tracing.real_steps import trace_or_measure_profile
from meshwright.profile.tracing.step import LossFunction
from meshwright.profile.values import ModelProfile


@dataclass
class Profiles:
    """The model may lie on the meta device; it is left as it is. `method` says how the last profile was obtained. A
    `known_structure` is that of the same model and sample, shared with others who need it."""

    model: nn.Module
    sample: Any
    loss: LossFunction | None = None
    target: str | None = None
    on_gpu: bool = True
    method: str = ""
    known_structure: InitVar[ModelStructure | None] = None
    _profiles: dict[tuple[str, str], ModelProfile] = field(default_factory=dict)

    def __post_init__(self, known_structure: ModelStructure | None) -> None:
        self.structure = known_structure or ModelStructure(self.model, self.sample, self.target)

    def module_calls(self, *, evaluating: bool = False) -> Counter[str]:
        """How often each module is called in a forward pass."""
        return Counter(call.module for call in self.structure.dataflow(evaluating).calls)

    def get(self, precision: str, recompute: Recompute) -> ModelProfile:
        """The profile in this precision, with this recomputation."""
        key = (precision, recompute)
        if key not in self._profiles:
            self._profiles[key], self.method = trace_or_measure_profile(
                self.model,
                self.sample,
                self.loss,
                precision=precision,
                on_gpu=self.on_gpu,
                target=self.target,
                recompute=recompute,
                with_structure=True,
                model_structure=self.structure,
            )
        return self._profiles[key]
