"""`Engine`: a program of published measurements as the simulator's `Runtime`. engines.yaml says how each differs from
eager PyTorch; its launch factor is fitted on other rows than those it is judged by (predictions/fit.py)."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from meshwright.cluster.cluster import Collective
from meshwright.errors import InputError, did_you_mean
from meshwright.files.yaml_file import read_mapping, validate
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.float8 import OUR_CASTS, Float8Casts, float8_profile, linear_layers
from meshwright.simulator.memory.device_memory import DeviceMemory
from meshwright.simulator.runtime import CutTransfer, MemoryInputs, ParameterExchange
from validation.engines.engine_memory import engine_memory_inputs
from validation.engines.engine_profile import engine_profile, pad_vocabulary
from validation.engines.engine_traits import EngineTraits

FILE = Path(__file__).with_name("engines.yaml")
# A number of 16 bits is read, and written twice in 8 bits.
_WITH_TRANSPOSES = Float8Casts(scale_bytes=0.0, cast_bytes=4.0, weights=False, again=False)


class Engine(EngineTraits):
    """A program of engines.yaml."""

    def executed_profile(self, profile: ModelProfile) -> ModelProfile:
        return engine_profile(profile, self)

    def float8_profile(self, profile: ModelProfile) -> ModelProfile:
        """Linear layers and experts, not the head and routers."""
        experts = {name for layer in profile.experts for name in layer.modules}
        layers = {name for name in linear_layers(profile) if name.rpartition(".")[2] not in ("head", "router")}
        casts = _WITH_TRANSPOSES if self.keeps_float8_weights else OUR_CASTS
        return float8_profile(profile, frozenset(layers | experts), casts)

    def weights_on_tensor_ranks(self, profile: ModelProfile) -> ModelProfile:
        names = {name for layer in profile.experts for name in layer.parameters}
        parameters = tuple(parameter for parameter in profile.parameters if parameter.names[0] not in names)
        return replace(profile, parameters=parameters) if names else profile

    def padded_profile(self, profile: ModelProfile) -> ModelProfile:
        return pad_vocabulary(profile, self.vocabulary_multiple)

    def memory_inputs(
        self, profile: ModelProfile, plan: Plan, optimizer: OptimizerCost, device: DeviceMemory
    ) -> MemoryInputs:
        return engine_memory_inputs(MemoryInputs(profile, optimizer, device), plan, self)

    def parameter_exchange(self, plan: Plan) -> ParameterExchange:
        tied_parts = 1 if self.sums_tied_whole else plan.axes.shard
        collective: Collective = "all_reduce" if self.all_reduces_shards else "reduce_scatter"
        return ParameterExchange(self.gradient_share, self.weight_share, tied_parts, "native", collective)

    def cut_transfer(self, size_bytes: float, plan: Plan) -> CutTransfer:
        """Each tensor rank sends its part of activations that are divided along the sequence or for sending."""
        size_bytes = size_bytes / 2 if self.keeps_half_weights(plan.numerics.precision) else size_bytes
        sequence, tensor = plan.modules.sequence, plan.axes.tensor
        gathers = self.scatters_at_cuts and not sequence and tensor > 1
        sent_bytes = size_bytes / (tensor if self.scatters_at_cuts or sequence else 1)
        return CutTransfer(sent_bytes, 0.0, size_bytes if gathers else 0.0)

    def resends_messages(self, plan: Plan) -> bool:
        selective = plan.memory.recompute == "selective"
        if selective and (self.recomputed_products or self.recomputes_attention):
            return False
        return super().resends_messages(plan)

    def host_wait_s(self, launch_s: float, device_s: float = 0.0) -> float:
        return super().host_wait_s(self.launch_factor * launch_s, 0.0 if self.blocks_on_launch else device_s)


@lru_cache(maxsize=1)
def engines() -> dict[str, Engine]:
    """All engines of engines.yaml by name."""
    raw = read_mapping(FILE, "engines")
    return {name: validate(Engine, {"name": name, **values}, f"engines.yaml: {name}") for name, values in raw.items()}


def engine_named(name: str) -> Engine:
    if name not in engines():
        raise InputError(f"there is no engine '{name}'{did_you_mean(name, engines())}")
    return engines()[name]
