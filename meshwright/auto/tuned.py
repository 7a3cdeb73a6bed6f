"""Tunes the plan of `mw.best_plan` in the ranks that there are: which variants are timed, on which copy of the user's
model and on which batch."""

import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.blocks.kept_results import kept_results
from meshwright.errors import InputError
from meshwright.numbers.limits import is_number
from meshwright.plan import Plan
from meshwright.planner.compute_variants import traits_of, variants_to_time
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.processes.world import World
from meshwright.profile.tracing.step import LossFunction
from meshwright.progress import say, showing
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.train.session import Session
from meshwright.train.step.batch import tensors_in
from meshwright.train.step.optimizer import rebuild_optimizer
from meshwright.train.tuning.kept import choice_file, code_of
from meshwright.train.tuning.ranks import TuningRequest, tune_in_ranks
from meshwright.train.tuning.steps import batch_of_size, plan_of_rank
from meshwright.train.tuning.variants import LONGEST_BUDGET_S, Variant, expected_compile_s

_RATE = 1e-3  # of the plain SGD that is timed without an optimizer


def variants_of(plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> list[Variant]:
    """Returns the variants of a plan that the search has found which may be timed."""
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)

    def predict(variant: Plan) -> Prediction:
        return predict_plan(
            inputs.cluster, profile, variant, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime
        )

    return [Variant(*item) for item in variants_to_time(plan, inputs, predict, traits_of(profile))]


def checked_budget_s(tune: Any, cluster: Any) -> float:
    """Returns the seconds that tuning may take. Raises an `InputError` if the argument `tune` cannot be used."""
    if tune is None:
        return LONGEST_BUDGET_S
    if not (is_number(tune) and 0 <= tune < math.inf):
        raise InputError(f"tune is {tune!r}: give a number of seconds, 0 to measure nothing, or None for 60 s")
    if tune > 0 and cluster is not None:
        raise InputError(
            f"tune is {tune!r} and cluster is {getattr(cluster, 'name', cluster)!r}: only the ranks that there are can"
            " be measured: leave out one of them"
        )
    return float(tune)


@dataclass(frozen=True)
class ModelToTune:
    """What a user gives `best_plan`, in the ranks of a world."""

    model: nn.Module
    sample: Any
    loss: LossFunction | None
    optimizer: torch.optim.Optimizer | None
    target: str | None
    global_batch: int
    world: World

    def can_be_timed(self, plan: Plan) -> bool:
        """Whether steps can be timed here: one rank runs them, the tensors have values, and the user does not want each
        start to compute with the same kernels."""
        tensors = (*self.model.parameters(), *self.model.buffers(), *tensors_in(self.sample))
        is_real = not any(tensor.is_meta for tensor in tensors)
        return is_real and plan_of_rank(plan) is not None and not torch.are_deterministic_algorithms_enabled()

    def request(self, plan: Plan, variants: list[Variant], budget_s: float) -> TuningRequest | None:
        """Returns what is to be timed; None if there is nothing to choose from."""
        if not variants:
            return None
        device = self.world.device
        others = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "batch": self.global_batch,
            "loss": code_of(self.loss),
            "optimizer": _described(self.optimizer),
        }
        try:
            file = choice_file(plan, self.model, self.sample, others)
        except Exception:  # raised by the model's own code, which describes it
            return None
        return TuningRequest(variants, budget_s, expected_compile_s(self.model), file)

    def tuned(self, plan: Plan, request: TuningRequest | None) -> Plan:
        """Returns the plan with the fastest variant of its `compute` fields. `request` is that of rank 0. All ranks
        call this together."""
        with showing(sys.stderr) if self.world.rank == 0 else nullcontext():
            return tune_in_ranks(plan, request, self._session, lambda _: [self._batch(plan)], self.world, say)

    def _batch(self, plan: Plan) -> Any:
        share = plan.share_sizes(self.global_batch)[self.world.rank]
        return batch_of_size(self.sample, max(1, share))

    def _session(self, plan: Plan, world: World) -> Session:
        copies: dict[int, Any] = dict(kept_results(self.model))
        # With the same memo, a loss that belongs to the model belongs to the copy.
        model, loss = deepcopy(self.model, copies), deepcopy(self.loss, copies)
        return Session(
            model, self._make_optimizer, loss=loss, plan=plan, world=world, target=self.target, sample=self.sample
        )

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer is None:
            return torch.optim.SGD(parameters.values(), lr=_RATE)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return rebuild_optimizer(self.optimizer, names, parameters)


def _described(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """The class of an optimizer, and which of its options are on."""
    if optimizer is None:
        return []
    options = {name: bool(value) if is_number(value) else repr(value) for name, value in optimizer.defaults.items()}
    return [code_of(type(optimizer)), dict(sorted(options.items()))]
