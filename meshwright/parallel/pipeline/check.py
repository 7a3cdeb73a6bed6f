"""Refuses pipelines of a plan that cannot run, before ranks start."""

from meshwright.blocks.module_names import is_inside
from meshwright.errors import InputError
from meshwright.parallel.pipeline.stage_dataflow import cuts_of_plan
from meshwright.parallel.pipeline.stages import pipeline_ranks_of_stages
from meshwright.plan import Plan
from meshwright.plan_fields.groups import STAGES_PER_RANK
from meshwright.profile.structure.cuts import Cut
from meshwright.profile.structure.structure import Structure

_MOST_NAMED = 12  # places in an error message


def check_pipeline(plan: Plan, structure: Structure) -> None:
    ranks, pipeline = plan.axes.pipeline, plan.pipeline
    if ranks == 1:
        return
    stages = len(pipeline.cuts) + 1
    required = ranks * STAGES_PER_RANK.get(pipeline.schedule, max(1, stages // ranks))
    if stages != required:
        raise InputError(
            f"plan.pipeline.cuts: {stages - 1} cuts make {stages} stages, but {pipeline.schedule} on {ranks} ranks runs"
            f" {required}: choose {required - 1} of the modules after which this model can be cut"
            f" ({_places(structure)}), or let them be found: best_plan(…, fix={{'axes.pipeline': {ranks}}}), or"
            f" meshwright plan --fix axes.pipeline={ranks}"
        )
    if structure.found_in_evaluation:
        raise InputError(
            "plan.axes.pipeline: chance or data decide which modules of this model run in training, so it cannot be cut"
            " into stages"
        )
    cuts = cuts_of_plan(plan, structure)
    if plan.axes.shard > 1:
        _check_shared_parameters(plan, structure, cuts)


def _places(structure: Structure) -> str:
    names = [cut.after for cut in structure.cuts]
    return ", ".join(names if len(names) <= _MOST_NAMED else [*names[: _MOST_NAMED - 1], "…", names[-1]]) or "none"


def _check_shared_parameters(plan: Plan, structure: Structure, cuts: tuple[Cut, ...]) -> None:
    """Raises an `InputError` if two stages of one rank use the same parameter, because FSDP2 can shard a parameter for
    only one of a rank's stages. The users known here are the stage before the first cut across which the parameter is
    shared, the stage after the last such cut, and stages with a module that holds it. If a stage between them uses it
    too, `shard` raises the same error later."""
    last_pieces = [structure.pieces.index(cut.after) for cut in cuts]  # of each stage but the last
    rank_of_stage = pipeline_ranks_of_stages(plan)
    for name in sorted({name for cut in cuts for name in cut.shared}):
        shared_over = [number for number, cut in enumerate(cuts) if name in cut.shared]
        modules = next((tie.modules for tie in structure.ties if name in tie.parameters), ())
        users = {shared_over[0], shared_over[-1] + 1}
        for place, piece in enumerate(structure.pieces):
            if any(is_inside(module, piece) for module in modules):
                users.add(sum(last_piece < place for last_piece in last_pieces))
        if len({rank_of_stage[stage] for stage in users}) < len(users):
            raise shared_between_stages_error(name, plan, users)


def shared_between_stages_error(name: str, plan: Plan, users: set[int] | None = None) -> InputError:
    """The error for a parameter that several stages of one rank use under `shard`. `users` are the stages that use
    it; None where they are not known."""
    ranks = plan.axes.pipeline
    schedules = f"1f1b with {ranks - 1} cut{'s' if ranks > 2 else ''}"
    if users and len({stage % ranks for stage in users}) == len(users):
        schedules = f"interleaved_1f1b, zero_bubble or {schedules}"
    stages = f"stages {' and '.join(map(str, sorted(users)))}" if users else "several stages"
    return InputError(
        f"plan.axes.shard is {plan.axes.shard} and cannot divide {name}: {stages} use it, and {plan.pipeline.schedule}"
        f" has some of them on one rank; choose the schedule {schedules}, or replicate in the place of shard"
    )
