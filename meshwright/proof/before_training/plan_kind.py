"""Which plans are checked before they train, and as which plan: a small one of the same kind, without what only makes
steps faster."""

from math import gcd
from typing import Any

from meshwright.errors import InputError, MixedSamples, UnequalPlan
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Compute

_MOST_SHARES = 32  # samples of a global batch, for plans whose ranks get different numbers of them
_MOST_FOUND = 3  # plans that a search proposes and a check refuses, before it proposes undivided ones only
_SAMPLES = 2  # of a microbatch: BatchNorm has no statistics of one sample


def needs_check(plan: Plan) -> bool:
    """Whether the plan divides or cuts the model, or gives ranks unequal parts of it or of a batch. Other plans copy or
    shard the whole model, and have a check of their own (`batch_state.py`)."""
    axes, modules = plan.axes, plan.modules
    divides = max(axes.tensor, axes.context, axes.pipeline, axes.expert) > 1
    splits_over_replicas = any(split.kind != "none" and split.axis == "replicate" for split in modules.splits.values())
    unequal = plan.shares.adaptive or len(set(plan.shares.samples)) > 1 or bool(plan.shares.uneven_shards)
    # A proof has no rule for what asynchronous parameter servers do.
    return plan.gradients.updates == "synchronous" and (divides or splits_over_replicas or unequal)


class UnequalDivisions:
    """The ways to divide a model that were found unequal, for searches of other plans. A search calls it with each
    plan, and it raises an `InputError` for those that divide the model in one of these ways, too; after `_MOST_FOUND`
    of them for all that divide it. If the model mixes samples, it does so for all plans that divide batches."""

    def __init__(self) -> None:
        self._divisions: list[set[str]] = []
        self._mixes_samples = False

    def add(self, plan: Plan, error: UnequalPlan | None = None) -> None:
        """Adds a plan that was refused with this error."""
        if isinstance(error, MixedSamples):
            self._mixes_samples = True
        else:
            self._divisions.append(_division(plan))

    def __call__(self, plan: Plan) -> None:
        if self._mixes_samples and plan.batch_parts > 1:
            raise InputError(f"the plan ({plan.summary()}) divides batches whose samples the model mixes")
        too_many = len(self._divisions) >= _MOST_FOUND and needs_check(plan)
        if too_many or any(division <= _division(plan) for division in self._divisions):
            raise InputError(f"the plan ({plan.summary()}) divides the model in a way that does not train it equally")


def refuse_divided(plan: Plan) -> None:
    """Raises an `InputError` for plans that divide or cut the model: others train the same model without a check."""
    if needs_check(plan):
        raise InputError(f"the plan ({plan.summary()}) divides the model")


def _division(plan: Plan) -> set[str]:
    """The names of what divides the model or a batch under this plan. A plan that copies or shards the model has none
    but its data ranks."""
    names = {axis for axis in ("tensor", "context", "pipeline", "expert") if getattr(plan.axes, axis) > 1}
    parts = {
        "sequence": plan.modules.sequence,
        "branches": bool(plan.modules.branches),
        "splits": any(split.axis == "replicate" for split in plan.modules.splits.values()),
        "shares": plan.shares.adaptive or bool(plan.shares.samples),
        "shards": bool(plan.shares.uneven_shards),
        "data": not needs_check(plan) and plan.data_ranks > 1,
    }
    return names | {name for name, is_used in parts.items() if is_used}


def small_plan(plan: Plan) -> Plan:
    """Returns the plan with which a check is made: the same division of the model, with few microbatches, and without
    compiled code, CUDA graphs and memory of the host, which take long to set up."""
    ranks = plan.axes.pipeline
    most_microbatches = 2 * ranks  # every schedule is then in each of its phases, and ranks divide it
    return plan.model_copy(
        update={
            "pipeline": plan.pipeline.model_copy(
                update={"microbatches": min(plan.pipeline.microbatches, most_microbatches)}
            ),
            "memory": plan.memory.model_copy(
                update={"accumulation": min(plan.memory.accumulation, 2), "offload": "none"}
            ),
            "compute": Compute(loss_chunks=plan.compute.loss_chunks),
            "numerics": plan.numerics.model_copy(update={"precision": "fp32", "cast": "operators"}),
            "gradients": plan.gradients.model_copy(update={"precision": "fp32"}),
        }
    )


def plan_kind(plan: Plan) -> dict[str, Any]:
    """Returns the fields of a small plan on which its result depends: two plans with the same kind train a model
    alike."""
    kind = plan.model_dump(mode="json", exclude_defaults=True)
    kind.get("gradients", {}).pop("bucket_bytes", None)
    return {group: fields for group, fields in kind.items() if fields and group != "compute"} | {
        "loss_chunks": plan.compute.loss_chunks > 1
    }


def samples_of_check(plan: Plan) -> int:
    """The number of samples in a global batch of the check: two for each microbatch of each rank, or as many as show
    the plan's unequal shares."""
    fewest = _SAMPLES * plan.batch_parts
    shares = plan.shares.samples
    if not shares:
        return fewest
    factor = gcd(*shares)
    parts = [share // factor for share in shares]
    repeats = -(-_SAMPLES * plan.microbatches // max(1, min(parts)))
    return max(fewest, min(_MOST_SHARES * plan.microbatches, repeats * sum(parts)))
