"""A model's profiles, traced when they are first asked for: each costs seconds for the largest models, so a search
asks for no more of them than its bounds leave."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshwright.blocks.recompute import Recompute
from meshwright.profile.structure.dataflow import record_flow
from meshwright.profile.tracing.real_steps import profile_or_measure
from meshwright.profile.tracing.step import LossFunction
from meshwright.profile.values import ModelProfile

_SAMPLES = 2


@dataclass
class Profiles:
    """The model may lie on the meta device; it is left as it is."""

    model: nn.Module
    sample: Any
    loss: LossFunction | None = None
    target: str | None = None
    on_gpu: bool = True
    how: str = ""
    _known: dict[tuple[str, str], ModelProfile] = field(default_factory=dict)

    def calls(self, *, evaluating: bool = False) -> Counter[str]:
        """How often each module is called in a forward pass."""
        flow = record_flow(self.model, self.sample, _SAMPLES, target=self.target, evaluating=evaluating)
        return Counter(call.module for call in flow.calls)

    def get(self, precision: str, recompute: Recompute) -> ModelProfile:
        key = (precision, recompute)
        if key not in self._known:
            self._known[key], self.how = profile_or_measure(
                self.model,
                self.sample,
                self.loss,
                precision=precision,
                on_gpu=self.on_gpu,
                target=self.target,
                recompute=recompute,
                structured=True,
            )
        return self._known[key]
