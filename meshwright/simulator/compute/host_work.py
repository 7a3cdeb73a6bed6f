"""Work of the host under plans with compiled code or CUDA graphs, counted in operators that it could launch in that
time (as in passes.py).

    compiled code   launches kernels without recording gradients and without calling modules, which is cheaper than an
                    operator of an eager pass; every call of a compiled function has a cost of its own
    CUDA graph      one launch for all that it captured: both passes of a step on a single rank, or one pass of a
                    compiled function if there are several ranks (train/step/cuda_graphs.py, parallel/compiled.py)
"""

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

# Calling a compiled function in one pass: guards on its inputs, and the function of autograd that contains it. From the
# MNIST net in validation/speed/h200.json, whose compiled step takes 0.92 of its eager step, both limited by the host.
COMPILED_CALL = 7.5
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
    units = compiled_units(profile, plan)
    has_graphs = plan.compute.cuda_graphs and on_gpu
    calls = sum(_compiled_calls(profile, plan, unit) for unit in units)
    launches = COMPILED_CALL * calls + (calls if has_graphs else 0)
    if phase == "forward":
        launches += STEP_OVERHEAD + parameters
    for segment in profile.segments:
        if segment.phase != phase:
            continue
        for operator in segment.operators:
            if not operator.chunks and any(not unit or is_inside(operator.layer, unit) for unit in units):
                cost = 0.0 if has_graphs else WITHOUT_GRADIENTS
            else:
                cost = CAST if operator.name == "_to_copy" else 1.0
            launches += segment.block_count * operator.runs * cost
    return launches


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
