"""The cuts of a pipeline that a plan leaves out: those with which the slowest stage is as fast as possible."""

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import STAGES_PER_RANK
from meshwright.planner.model_summary import ModelSummary

_STAGES = {**STAGES_PER_RANK, "interleaved_1f1b": 2}  # the fewest with which the schedule interleaves stages


def lacks_cuts(plan: Plan) -> bool:
    """Whether the plan has a pipeline and does not say where the model is cut."""
    return plan.axes.pipeline > 1 and not plan.pipeline.cuts


def with_cuts(plan: Plan, summary: ModelSummary) -> Plan:
    """Returns the plan with cuts. Raises an `InputError` if the model can be cut into too few stages."""
    if not lacks_cuts(plan):
        return plan
    stages = plan.axes.pipeline * _STAGES.get(plan.pipeline.schedule, 1)
    cuts = summary.cuts(stages, plan.memory.recompute)
    if cuts is None:
        places = sum(piece.cuttable for piece in summary.pieces)
        raise InputError(
            f"plan.axes.pipeline is {plan.axes.pipeline}, for which {plan.pipeline.schedule} needs {stages} stages, but"
            f" the model can be cut into at most {places + 1}: choose fewer ranks"
        )
    names = tuple(summary.pieces[piece].name for piece in cuts)
    pipeline = plan.pipeline.model_copy(update={"cuts": names})
    return plan.model_copy(update={"pipeline": pipeline})
