"""What of a plan's pipeline cannot be run, said before ranks start."""

from meshwright.errors import InputError
from meshwright.parallel.pipeline_wiring import chosen_cuts
from meshwright.plan import STAGES_PER_RANK, Plan
from meshwright.profile.structure import Structure


def check_pipeline(plan: Plan, structure: Structure) -> None:
    ranks, chosen = plan.axes.pipeline, plan.pipeline
    if ranks == 1:
        if chosen.cuts:
            raise InputError(
                f"plan.pipeline has {len(chosen.cuts)} cuts, but plan.axes.pipeline is 1: set it to the number of ranks"
                " that share the stages, or leave the cuts out"
            )
        return
    stages = len(chosen.cuts) + 1
    wanted = ranks * STAGES_PER_RANK.get(chosen.schedule, max(1, stages // ranks))
    if stages != wanted:
        raise InputError(
            f"plan.pipeline.cuts: {stages - 1} cuts make {stages} stages, but {chosen.schedule} on {ranks} ranks runs"
            f" {wanted}: choose {wanted - 1} cuts"
        )
    if structure.evaluated:
        raise InputError(
            "plan.axes.pipeline: chance or data decide which modules of this model run in training, so it cannot be cut"
            " into stages"
        )
    _check_microbatches(chosen.schedule, ranks, chosen.microbatches)
    chosen_cuts(plan, structure)


def _check_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    """What PyTorch's schedules refuse."""
    if schedule == "1f1b" and microbatches < ranks:
        raise InputError(
            f"plan.pipeline.microbatches is {microbatches}, but 1f1b needs as many as ranks: choose at least {ranks},"
            " or gpipe"
        )
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved_1f1b", "zero_bubble") and microbatches % rounds:
        below = microbatches - microbatches % ranks
        raise InputError(
            f"plan.pipeline.microbatches is {microbatches}, which {schedule} cannot run in {rounds} rounds on {ranks}"
            f" ranks: choose {below} or {below + ranks}"
        )
