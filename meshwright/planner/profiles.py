"""`Profiles`: the profiles of one model in several precisions and levels of recomputation. Each is traced when it is
first needed, because tracing a large model takes seconds and a search needs only some of them."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import InitVar, dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from torch import nn

from meshwright.blocks.recompute import Recompute
from meshwright.model_io.batch import target_key
from meshwright.profile.experts import balances_experts
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.tracing.real_steps import trace_or_measure_profile
from meshwright.profile.tracing.step import LossFunction
from meshwright.profile.tracing.trace import has_squares
from meshwright.profile.values import ModelProfile
from meshwright.progress import phase

Value = TypeVar("Value")


@dataclass
class Profiles:
    """Traces and caches the profiles of one model. The model may be on the meta device; it is not changed. `method` is
    a phrase that says how the latest profile was obtained, `trace_s` how long that took. `known_structure` is the
    `ModelStructure` of the same model and sample, if the caller has one to share."""

    model: nn.Module
    sample: Any
    loss: LossFunction | None = None
    target: str | None = None
    on_gpu: bool = True
    method: str = ""
    trace_s: float = 0.0
    known_structure: InitVar[ModelStructure | None] = None
    _profiles: dict[tuple[str, str], ModelProfile] = field(default_factory=dict)
    _once: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self, known_structure: ModelStructure | None) -> None:
        self.structure = known_structure or ModelStructure(
            self.model, self.sample, target_key(self.target, self.loss is not None)
        )

    @property
    def compares_samples(self) -> bool:
        """Whether the loss compares all samples of a global batch, as a load-balancing loss of routers does."""
        return hasattr(self.loss, "joined") or (self.loss is None and balances_experts(self.model))

    def module_calls(self, *, evaluating: bool = False) -> Counter[str]:
        """How often each module is called in a forward pass, by name. The pass is in evaluation mode if `evaluating` is
        True."""
        return Counter(call.module for call in self.structure.dataflow(evaluating).calls)

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value of `make`, which is called for the first of equal keys only: something that follows from
        the model, for all searches that these profiles are used in."""
        if key not in self._once:
            self._once[key] = make()
        value: Value = self._once[key]
        return value

    def is_traced(self, precision: str, recompute: Recompute) -> bool:
        """Whether `get` returns this profile without tracing it."""
        return (precision, recompute) in self._profiles

    def get(self, precision: str, recompute: Recompute) -> ModelProfile:
        """Returns the profile in this precision, with this level of recomputation. It includes the model's structure if
        it could be traced."""
        key = (precision, recompute)
        if key not in self._profiles:
            begin = perf_counter()
            with phase(f"tracing a step of the model in {precision}"):
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
                    is_linear=self._is_linear(precision),
                )
            self.trace_s = perf_counter() - begin
        return self._profiles[key]

    def _is_linear(self, precision: str) -> bool:
        """Whether the profile without recomputation has been traced at three batch sizes, and has no squares."""
        plain = self._profiles.get((precision, "none"))
        return plain is not None and len(plain.traced_batches) > 2 and not has_squares(plain)
