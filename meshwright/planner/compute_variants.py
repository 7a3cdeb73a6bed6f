"""How each rank of a plan runs its operators: the memory layout of images, a fused optimizer, a loss in chunks,
`torch.compile` and CUDA graphs. The search ranks plans by their axes, precision and memory first; `best_variant` then
predicts the few best plans with these choices, one group of choices after the other:

    images        channels_last for convolutions in fp32 (in lower precisions the search lays all images out like this),
                  or NNPACK's convolutions, on CPUs
    optimizer     fused kernels, on GPUs
    compilation   CUDA graphs, compiled blocks, compiled blocks with CUDA graphs, the compiled model (or stages), or
                  that with CUDA graphs; on GPUs. CUDA graphs only if layers are not split and the model is not cut
    loss          in chunks of 4,096 or 1,024 tokens, for models whose loss is a cross entropy of a linear head's scores

In each group the fastest choice that fits wins, or the simplest one that is at most `_TOLERANCE` slower than that.
A plan that does not fit is simulated with a loss in chunks, too (`plan_that_fits`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from meshwright.errors import InputError
from meshwright.limits import MOST_CHUNKS
from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs, fp32_image_kernels
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.chunked_loss import scored_tokens
from meshwright.simulator.predict import Prediction

# A chosen value: what saves less is not worth the additional seconds before the first step, or other last bits.
_TOLERANCE = 0.01

Predict = Callable[[Plan], Prediction]
_Choices = list[dict[str, Any]]  # fields of `Compute`, the simplest choice first
# Tokens of a chunk. Fewer would make products so small that they are slow; the last number is only for plans that do
# not fit otherwise. Chosen values.
_CHUNK_TOKENS = (4096, 1024, 256)


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


def plan_that_fits(
    plan: Plan, inputs: PlanningInputs, predict: Predict, profile: ModelProfile
) -> tuple[Plan, Prediction]:
    """Returns the plan and its prediction. If it does not fit, but does with a loss in chunks, it is returned with the
    fewest chunks that fit."""
    prediction = predict(plan)
    if inputs.allow == "same" or prediction.memory.device_bytes <= inputs.capacity_bytes:
        return plan, prediction
    choices = _chunks(plan, prediction, traits_of(profile), _CHUNK_TOKENS)
    return next(_predicted(plan, choices, inputs, predict), (plan, prediction))


def best_variant(
    plan: Plan, prediction: Prediction, inputs: PlanningInputs, predict: Predict, traits: ModelTraits
) -> tuple[Plan, Prediction]:
    """Returns the plan with the best choices for its `compute` fields, and its prediction. `prediction` is that of the
    plan as it is."""
    if inputs.allow == "same":
        return plan, prediction
    in_chunks = _chunks(plan, prediction, traits, _CHUNK_TOKENS[:2])
    compilations = _compilations(plan, inputs, traits.blocks)
    for choices in (_image_kernels(plan, inputs, traits.images), _optimizers(inputs), compilations, in_chunks):
        plan, prediction = _fastest(plan, prediction, choices, inputs, predict)
    return plan, prediction


def _fastest(
    plan: Plan, prediction: Prediction, choices: _Choices, inputs: PlanningInputs, predict: Predict
) -> tuple[Plan, Prediction]:
    """Returns the fastest of the plan and its variants that the executor accepts and that fit, or the first that is
    almost as fast."""
    options = [(plan, prediction), *_predicted(plan, choices, inputs, predict)]
    fastest_s = min(predicted.step_s for _, predicted in options)
    return next(option for option in options if option[1].step_s <= (1 + _TOLERANCE) * fastest_s)


def _predicted(
    plan: Plan, choices: _Choices, inputs: PlanningInputs, predict: Predict
) -> Iterator[tuple[Plan, Prediction]]:
    for choice in choices:
        variant = plan.model_copy(update={"compute": plan.compute.model_copy(update=choice)})
        if _is_accepted(variant, inputs):
            prediction = predict(variant)
            if prediction.memory.device_bytes <= inputs.capacity_bytes:
                yield variant, prediction


def _is_accepted(plan: Plan, inputs: PlanningInputs) -> bool:
    try:
        inputs.check_plan(plan)
    except InputError:
        return False
    return True


def _image_kernels(plan: Plan, inputs: PlanningInputs, images: bool) -> _Choices:
    is_fixed = not images or plan.numerics.precision != "fp32"
    return [] if is_fixed else [dict(choice) for choice in fp32_image_kernels(inputs)]


def _optimizers(inputs: PlanningInputs) -> _Choices:
    return [{"fused_optimizer": True}] if inputs.can_fuse_optimizer else []


def _chunks(plan: Plan, prediction: Prediction, traits: ModelTraits, sizes: Iterable[int]) -> _Choices:
    """Losses in chunks of these numbers of tokens, as far as there are as many. None if the plan has chunks already, or
    divides the model, with which chunks do not work."""
    is_divided = plan.axes.tensor > 1 or plan.axes.pipeline > 1 or bool(plan.modules.splits)
    if plan.compute.loss_chunks > 1 or is_divided:
        return []
    tokens = prediction.batch_per_rank * traits.loss_tokens
    counts = dict.fromkeys(min(ceil(tokens / size), MOST_CHUNKS) for size in sizes)
    return [{"loss_chunks": count} for count in counts if count > 1]


def _compilations(plan: Plan, inputs: PlanningInputs, blocks: bool) -> _Choices:
    # On CPUs nothing is compiled yet: the time of compiled operators is not calibrated there.
    if inputs.cluster.kind != "cuda":
        return []
    choices: _Choices = []
    if plan.world_size == 1:  # without compiled code, a graph includes the whole step and cannot include communication
        choices.append({"cuda_graphs": True})
    for compiled in _compiled_parts(plan, blocks):
        choices.append({"compile": compiled})
        if plan.axes.tensor == plan.axes.pipeline == 1:
            choices.append({"compile": compiled, "cuda_graphs": True})
    return choices


def _compiled_parts(plan: Plan, blocks: bool) -> list[str]:
    """The values of `compute.compile` that make a difference under this plan (parallel/compiled.py). Of a sharded model
    and of one with split layers the blocks are compiled in either case."""
    if plan.compile_obstacle:
        return []
    if plan.axes.tensor > 1:
        return ["blocks"] if blocks else []
    if plan.axes.shard > 1:
        return ["blocks"]
    return ["blocks", "model"] if blocks else ["model"]
