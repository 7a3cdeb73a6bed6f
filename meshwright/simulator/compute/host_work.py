"""Work of the host under plans with compiled code or CUDA graphs, counted in operators that it could launch in that
time (as in passes.py).

    compiled code   a kernel costs as much as an operator of an eager pass: its output is allocated and it is launched
                    from Python; every call of a compiled function has a cost of its own
    CUDA graph      one launch for all that it captured: both passes of a step on a single rank, or one pass of a
                    compiled function if there are several ranks (train/step/cuda_graphs.py, parallel/compiled.py).
                    Its kernels also follow each other faster on the device                               removed_gaps_s
"""

from dataclasses import dataclass

from meshwright.blocks.module_names import is_inside
from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile, Phase
from meshwright.simulator.compute.compiled_profile import compiled_units
from meshwright.simulator.compute.passes import (
    CAST,
    STEP_OVERHEAD,
    STEP_OVERHEAD_PER_PARAMETER,
    WITHOUT_GRADIENTS,
)
from meshwright.simulator.profile_cache import ProfileCache

# Calling a compiled function in one pass: guards on its inputs, and the function of autograd that contains it. A chosen
# value, not measured. Compiled steps of the MNIST net in validation/speed/h200.json take 0.95 to 1.07 of its eager
# steps, and are predicted to take 1.3.
COMPILED_CALL = 2.0
# A kernel of compiled code. Chosen because of two workloads in the same file whose compiled steps are longer than their
# kernels: DeepLabV3, 1,024 kernels in 52 to 58 ms, and GPT-2 1.5B with a batch of 4. Neither step was traced.
COMPILED_KERNEL = 1.0
# What the device waits less between two operators in a graph than between two that the host has launched in advance.
# From the same file: the median over five workloads that are limited by the device, eager and compiled (0.7 to 2.4 µs).
GAP_S = 1.8e-6
# What a step with a graph launches beside the graph: copies of inputs, targets and loss, and the optimizer. Counted.
BESIDE_GRAPH = 3 * WITHOUT_GRADIENTS + 1.0


def captures_step(plan: Plan, on_gpu: bool) -> bool:
    """Whether both passes of a step are one CUDA graph."""
    return plan.compute.cuda_graphs and plan.processes == 1 and on_gpu


def changes_host_work(profile: ModelProfile, plan: Plan, on_gpu: bool) -> bool:
    """Whether the host launches anything else than all operators of an eager step."""
    return captures_step(plan, on_gpu) or bool(compiled_units(profile, plan))


def host_launches(profile: ModelProfile, phase: Phase, plan: Plan, on_gpu: bool) -> float:
    """The launches of a pass, and what costs the host as much. `profile` is that of the compiled model."""
    parameters = STEP_OVERHEAD_PER_PARAMETER * len(profile.parameters)
    if captures_step(plan, on_gpu):
        return 1 + BESIDE_GRAPH + parameters if phase == "forward" else 0.0
    has_graphs = plan.compute.cuda_graphs and on_gpu
    work = _compiled_work(profile, phase, plan)
    launches = COMPILED_CALL * work.calls + (work.calls if has_graphs else 0) + work.others
    if not has_graphs:
        launches += COMPILED_KERNEL * work.kernels
    if phase == "forward":
        launches += STEP_OVERHEAD + parameters
    return launches


def removed_gaps_s(profile: ModelProfile, phase: Phase, plan: Plan, on_gpu: bool) -> float:
    """The seconds that the device is faster with a pass because its operators are in CUDA graphs. `profile` is that of
    the compiled model."""
    if not plan.compute.cuda_graphs or not on_gpu:
        return 0.0
    work = _compiled_work(profile, phase, plan)
    return GAP_S * (work.runs if captures_step(plan, on_gpu) else work.kernels)


@dataclass(frozen=True)
class _CompiledWork:
    """The compiled functions that a pass calls, the operators in them (`kernels`), the launches of the other operators,
    and how often any operator runs."""

    calls: int
    kernels: float
    others: float
    runs: float


_WORK: ProfileCache[_CompiledWork] = ProfileCache(512)


def _compiled_work(profile: ModelProfile, phase: Phase, plan: Plan) -> _CompiledWork:
    units = compiled_units(profile, plan)
    key = (units, phase, plan.axes.tensor > 1)
    return _WORK.get(profile, key, lambda: _count_work(profile, phase, plan, units))


def _count_work(profile: ModelProfile, phase: Phase, plan: Plan, units: tuple[str, ...]) -> _CompiledWork:
    kernels = others = runs = 0.0
    known: dict[str, bool] = {}
    for segment in profile.segments:
        if segment.phase != phase:
            continue
        for operator in segment.operators:
            if operator.layer not in known:
                known[operator.layer] = any(not unit or is_inside(operator.layer, unit) for unit in units)
            times = segment.block_count * operator.runs
            runs += times
            if known[operator.layer] and not operator.chunks:
                kernels += times
            else:
                others += times * (CAST if operator.name == "_to_copy" else 1.0)
    return _CompiledWork(sum(_compiled_calls(profile, plan, unit) for unit in units), kernels, others, runs)


def _compiled_calls(profile: ModelProfile, plan: Plan, unit: str) -> int:
    """The number of compiled functions of a module that one pass calls; 0 if the module is not in this stage. Those of
    a module with split layers end where a group of split layers begins or ends, because there is a collective."""
    in_stage = not unit or any(
        unit in segment.blocks or (not segment.blocks and any(is_inside(o.layer, unit) for o in segment.operators))
        for segment in profile.segments
    )
    if not in_stage or plan.axes.tensor == 1:
        return int(in_stage)
    groups = profile.structure.splits if profile.structure else ()
    return 1 + 2 * sum(is_inside(group.splits[0].module, unit) for group in groups)
