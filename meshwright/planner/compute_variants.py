"""How each rank of a plan runs its operators: the memory layout of images, a fused optimizer, a loss in chunks,
`torch.compile` and CUDA graphs; and how it sends gradients and weights:

    images        channels_last for convolutions in fp32 (in lower precisions the search lays all images out like this),
                  or NNPACK's convolutions, on CPUs
    optimizer     fused kernels, on GPUs
    compilation   CUDA graphs, compiled blocks, compiled blocks with CUDA graphs, the compiled model (or stages), or
                  that with CUDA graphs; on GPUs. CUDA graphs only if layers are not split and the model is not cut
    loss          in chunks of 4,096, 1,024 or 256 tokens, for models whose loss is a cross entropy of a linear head's
                  scores
    weights       that the shard axis gathers are rounded to bf16 or fp16 before (`numerics.cast: weights`), if plans in
                  these precisions may change the arithmetic
    buckets       of other sizes than the default, for gradients of replicas. These change no bit

The search predicts these fields together with all others (polish/neighbours.py). `best_variant` is for one plan with
other inputs, one group of fields after the other. Where the devices are at hand, a few variants of the best plan are
timed before one is taken (train/tuning/): `variants_to_time` lists them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.numbers.limits import MOST_CHUNKS
from meshwright.plan import Plan
from meshwright.plan_fields.groups import MIB
from meshwright.planner.candidates import AxisSizes
from meshwright.planner.inputs import PlanningInputs, fp32_image_kernels
from meshwright.planner.preference import PredictedPlan, preferred
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.combining import fastest_algorithm
from meshwright.simulator.communication.placement import group_of_axes
from meshwright.simulator.compute.chunked_loss import scored_tokens
from meshwright.simulator.predict import Prediction

Predict = Callable[[Plan], Prediction]
_Choices = list[dict[str, dict[str, Any]]]  # fields by group of the plan, the simplest choice first
# Tokens of a chunk. Fewer would make products so small that they are slow; the last number is only for plans that do
# not fit otherwise. Chosen values.
CHUNK_TOKENS = (4096, 1024, 256)
BUCKETS = (100 * MIB, 5 * MIB, MIB)  # chosen: larger and smaller ones than torch's default, which is 25 MiB


@dataclass(frozen=True)
class ModelTraits:
    """What decides which choices a model has. `images` says whether it has convolutions, `blocks` whether it has blocks
    that are compiled by themselves. `loss_tokens` is the number of tokens of a sample whose loss can be computed in
    chunks, 0 if it cannot."""

    images: bool = False
    blocks: bool = True
    loss_tokens: float = 0.0


def traits_of(profile: ModelProfile) -> ModelTraits:
    return ModelTraits(profile.has_convolutions, bool(profile.blocks), scored_tokens(profile))


def plan_that_fits(plan: Plan, inputs: PlanningInputs, predict: Predict, profile: ModelProfile) -> PredictedPlan:
    """Returns the plan and its prediction. If it does not fit, but does with a loss in chunks, it is returned with the
    fewest chunks that fit."""
    prediction = predict(plan)
    if inputs.allow == "same" or inputs.fits(prediction):
        return plan, prediction
    choices = _chunks(plan, prediction, traits_of(profile), CHUNK_TOKENS)
    return next(_predicted(plan, choices, inputs, predict), (plan, prediction))


def best_variant(
    plan: Plan, prediction: Prediction, inputs: PlanningInputs, predict: Predict, traits: ModelTraits
) -> PredictedPlan:
    """Returns the plan with the preferred choices for these fields that fit, one group of fields after the other, with
    its prediction. `prediction` is that of the plan as it is."""
    best = (plan, prediction)
    groups = [_buckets(plan)]
    if inputs.allow != "same":
        in_chunks = _chunks(plan, prediction, traits, CHUNK_TOKENS[:2])
        compilations = _compilations(plan, inputs, traits.blocks)
        images = _image_kernels(plan, inputs, traits.images)
        groups = [images, _optimizers(inputs), compilations, in_chunks, _casts(inputs), *groups]
    for choices in groups:
        options = [best, *_predicted(best[0], choices, inputs, predict)]
        best = options[preferred(options)]
    return best


# Besides eager steps and the compiled model, so many other variants that compile or use CUDA graphs are timed, if their
# predicted step is at most so many times as long as the shortest. Chosen values.
_MOST_OTHERS, _OTHERS_WITHIN = 2, 1.25
_EAGER = {"compile": "none", "compile_mode": "default", "cuda_graphs": False}


def variants_to_time(
    plan: Plan, inputs: PlanningInputs, predict: Predict, traits: ModelTraits
) -> list[tuple[Plan, float | None]]:
    """Returns variants of the `compute` fields of a plan that the search has found, with their predicted seconds per
    step; None where no prediction is possible. Those that are ready sooner come first: the eager step; the eager step
    with other kernels for images and with a fused optimizer; the compiled model (or its blocks, where only these can be
    compiled); each of these with CUDA graphs of the whole step, which take no second compilation; and the fastest
    others by prediction, the plan itself among them. Every plan is accepted by `inputs.check_plan`, and is predicted to
    fit if it has a prediction. Empty if plans may change nothing but the order of sums."""
    if inputs.allow == "same":
        return []
    eager = _with_compute(plan, _EAGER)
    kernels: list[dict[str, Any]] = []
    if traits.images and plan.numerics.precision == "fp32":
        usual = {"layout": "contiguous", "convolutions": "default"}
        kernels = [{**usual, **choice} for choice in ({}, *fp32_image_kernels(inputs))]
    fused = {} if plan.compute.fused_optimizer else {"fused_optimizer": True}
    uncompiled = [eager, *(_with_compute(eager, choice) for choice in (*kernels, fused))]
    base = _with_compute(eager, {"convolutions": "default"})
    parts = [] if plan.compile_obstacle else _compiled_parts(plan.axes.tensor, plan.axes.shard, traits.blocks)
    whole = [_with_compute(base, {"compile": part}) for part in parts[-1:]]
    others = [plan]
    for choice in _compilations(base, inputs, traits.blocks):
        # Without compiled code, a graph holds the kernels of the eager step.
        start = base if "compile" in choice["compute"] else eager
        others.append(_with_compute(start, choice["compute"]))
    on_gpu = inputs.cluster.kind == "cuda"
    timed = [*_accepted(uncompiled, inputs, predict), *_accepted(whole, inputs, predict if on_gpu else None)]
    if on_gpu and inputs.device.has_graphs and plan.world_size == 1:
        captured = [_with_compute(variant, {"cuda_graphs": True}) for variant, _ in timed]
        timed += _accepted(captured, inputs, predict)
    known = [variant for variant, _ in timed]
    predicted = [item for item in _accepted(others, inputs, predict) if item[0] not in known]
    shortest_s = min((seconds for _, seconds in (*predicted, *timed) if seconds is not None), default=0.0)
    fast = [item for item in predicted if item[0] == plan or (item[1] or 0.0) <= _OTHERS_WITHIN * shortest_s]
    fast.sort(key=lambda item: (item[0] != plan, item[1]))  # what the search has found is always among them
    timed += sorted(fast[:_MOST_OTHERS], key=lambda item: item[1] or 0.0)
    return sorted(timed, key=lambda item: (item[0].compute.compile != "none", item[0].compute.cuda_graphs))


def _accepted(
    plans: Iterable[Plan], inputs: PlanningInputs, predict: Predict | None
) -> Iterator[tuple[Plan, float | None]]:
    """Yields the plans that can run and that fit, each once, with their predicted seconds. Without `predict`, all that
    can run are yielded, or none where memory is limited by a constraint."""
    known: list[Plan] = []
    for plan in plans:
        if plan in known or not _is_accepted(plan, inputs):
            continue
        known.append(plan)
        if predict is None:
            if inputs.constraints.max_memory is None:
                yield plan, None
        elif inputs.fits(prediction := predict(plan)):
            yield plan, prediction.step_s


def _with_compute(plan: Plan, fields: dict[str, Any]) -> Plan:
    return plan.model_copy(update={"compute": plan.compute.model_copy(update=fields)})


def _predicted(plan: Plan, choices: _Choices, inputs: PlanningInputs, predict: Predict) -> Iterator[PredictedPlan]:
    for choice in choices:
        groups = {name: getattr(plan, name).model_copy(update=fields) for name, fields in choice.items()}
        variant = plan.model_copy(update=groups)
        if _is_accepted(variant, inputs):
            prediction = predict(variant)
            if inputs.fits(prediction):
                yield variant, prediction


def _is_accepted(plan: Plan, inputs: PlanningInputs) -> bool:
    try:
        inputs.check_plan(plan)
    except InputError:
        return False
    return True


def _image_kernels(plan: Plan, inputs: PlanningInputs, images: bool) -> _Choices:
    is_fixed = not images or plan.numerics.precision != "fp32"
    return [] if is_fixed else [{"compute": dict(choice)} for choice in fp32_image_kernels(inputs)]


def _optimizers(inputs: PlanningInputs) -> _Choices:
    return [{"compute": {"fused_optimizer": True}}] if inputs.can_fuse_optimizer else []


def _casts(inputs: PlanningInputs) -> _Choices:
    return [{"numerics": {"cast": "weights"}}] if inputs.allow == "changes" else []


def _buckets(plan: Plan) -> _Choices:
    """Buckets of other sizes than the plan's. With a shard axis, the blocks of the model take the place of buckets."""
    if plan.axes.replicate == 1 or plan.axes.shard > 1:
        return []
    sizes = [size for size in BUCKETS if size != plan.gradients.bucket_bytes]
    return [{"gradients": {"bucket_bytes": size}} for size in sizes]


def _chunks(plan: Plan, prediction: Prediction, traits: ModelTraits, sizes: Iterable[int]) -> _Choices:
    """Losses in chunks of these numbers of tokens, as far as there are as many. None if the plan has chunks already."""
    if plan.compute.loss_chunks > 1:
        return []
    tokens = prediction.batch_per_rank * traits.loss_tokens
    counts = dict.fromkeys(min(ceil(tokens / size), MOST_CHUNKS) for size in sizes)
    return [{"compute": {"loss_chunks": count}} for count in counts if count > 1]


def _compilations(plan: Plan, inputs: PlanningInputs, blocks: bool) -> _Choices:
    """What can be compiled under this plan, and captured in CUDA graphs."""
    parts = [] if plan.compile_obstacle else _compiled_parts(plan.axes.tensor, plan.axes.shard, blocks)
    is_divided = plan.axes.tensor > 1 or plan.axes.pipeline > 1
    choices: _Choices = [{"compute": fields} for fields in _compiled(parts, inputs, plan.world_size == 1, is_divided)]
    if plan.compute.loss_chunks > 1:  # compiled code keeps fewer tensors, so that the plan may fit without chunks
        choices += [{"compute": {**choice["compute"], "loss_chunks": 1}} for choice in choices]
    return choices


def compilations(sizes: AxisSizes, recompute: str, inputs: PlanningInputs, blocks: bool) -> list[dict[str, Any]]:
    """The values of `compile` and `cuda_graphs` of plans with these axes that keep the constraints: eager steps first,
    what is mostly the fastest last."""
    eager = {"compile": "none", "cuda_graphs": False}
    if inputs.allow == "same":
        return [eager]
    is_split = sizes.splits_wide_layers or (sizes.tensor > 1 and (sizes.placed_branches or recompute == "selective"))
    parts = (
        [] if sizes.expert > 1 or sizes.context > 1 or is_split else _compiled_parts(sizes.tensor, sizes.shard, blocks)
    )
    is_divided = sizes.tensor > 1 or sizes.pipeline > 1
    choices = [eager, *({**eager, **fields} for fields in _compiled(parts, inputs, sizes.ranks == 1, is_divided))]
    return [fields for fields in choices if _keeps(fields, inputs)] or [eager]


def _keeps(compute: dict[str, Any], inputs: PlanningInputs) -> bool:
    """Whether fields of `compute` have the values that constraints fix, and none that they exclude."""
    named, constraints = {f"compute.{name}": value for name, value in compute.items()}, inputs.constraints
    fixed = all(constraints.fixed.get(name, value) == value for name, value in named.items())
    return fixed and not any(named.get(name) == value for name, value in constraints.excluded if name in named)


def _compiled(parts: list[str], inputs: PlanningInputs, is_alone: bool, is_divided: bool) -> list[dict[str, Any]]:
    # On CPUs nothing is compiled yet: the time of compiled operators is not calibrated there.
    if inputs.cluster.kind != "cuda":
        return []
    has_graphs = inputs.device.has_graphs and inputs.offload == "none"
    # Without compiled code, a graph includes the whole step and cannot include communication.
    choices: list[dict[str, Any]] = [{"cuda_graphs": True}] if is_alone and has_graphs else []
    for compiled in parts:
        choices.append({"compile": compiled})
        if not is_divided and has_graphs:
            choices.append({"compile": compiled, "cuda_graphs": True})
    return choices


def _compiled_parts(tensor: int, shard: int, blocks: bool) -> list[str]:
    """The values of `compute.compile` that make a difference with these axes (parallel/compiled.py). Of a sharded model
    and of one with split layers the blocks are compiled in either case."""
    if tensor > 1:
        return ["blocks"] if blocks else []
    if shard > 1:
        return ["blocks"]
    return ["blocks", "model"] if blocks else ["model"]


def with_gradient_algorithm(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """Returns the plan with the algorithm that is predicted to average the gradients of replicas fastest. On GPUs, and
    without replicas, the plan is unchanged."""
    if plan.axes.replicate == 1 or cluster.kind != "cpu":
        return plan
    weights = sum(parameter.bytes for parameter in profile.parameters if parameter.trainable)
    bucket = min(plan.gradients.bucket_bytes, weights / plan.axes.shard / plan.axes.tensor / plan.axes.pipeline)
    algorithm = fastest_algorithm(bucket, group_of_axes(plan.axes, ("replicate",), cluster), cluster)
    return plan.model_copy(update={"gradients": plan.gradients.model_copy(update={"algorithm": algorithm})})


def with_exchanges(plan: Plan, profile: ModelProfile, cluster: Cluster, step_s: Callable[[Plan], float]) -> Plan:
    """Returns the plan with the exchanges that are predicted to be fastest: of gradients and, with a context axis, of
    keys and values. `step_s` predicts the seconds of a step."""
    plan = with_gradient_algorithm(plan, profile, cluster)
    if plan.axes.context == 1:
        return plan
    gathering = plan.model_copy(
        update={"modules": plan.modules.model_copy(update={"attention_exchange": "all_gather"})}
    )
    return min((plan, gathering), key=step_s)
