"""What of a plan's pipeline cannot be run, said before ranks start."""

from meshwright.blocks.module_names import within
from meshwright.errors import InputError
from meshwright.parallel.pipeline.stages import places
from meshwright.parallel.pipeline.wiring import chosen_cuts
from meshwright.plan import STAGES_PER_RANK, Plan
from meshwright.profile.structure.cuts import Cut
from meshwright.profile.structure.structure import Structure


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
    cuts = chosen_cuts(plan, structure)
    if plan.axes.shard > 1:
        _check_shared(plan, structure, cuts)


def _check_shared(plan: Plan, structure: Structure, cuts: tuple[Cut, ...]) -> None:
    """FSDP2 divides a weight for one of a rank's stages. Here stages count that are known to use it; should others
    between them do so too, `shard` says it."""
    ends = [structure.pieces.index(cut.after) for cut in cuts]
    homes = places(plan)
    for name in sorted({name for cut in cuts for name in cut.shared}):
        crossed = [number for number, cut in enumerate(cuts) if name in cut.shared]
        modules = next((tie.modules for tie in structure.ties if name in tie.parameters), ())
        users = {crossed[0], crossed[-1] + 1}
        for place, piece in enumerate(structure.pieces):
            if any(within(module, piece) for module in modules):
                users.add(sum(end < place for end in ends))
        if len({homes[stage] for stage in users}) < len(users):
            raise on_several_stages(name, plan, users)


def on_several_stages(name: str, plan: Plan, users: set[int] | None = None) -> InputError:
    """`users` are the stages that use the weight, where they are known."""
    ranks = plan.axes.pipeline
    others = f"1f1b with {ranks - 1} cut{'s' if ranks > 2 else ''}"
    if users and len({stage % ranks for stage in users}) == len(users):
        others = f"interleaved_1f1b, zero_bubble or {others}"
    where = f"stages {' and '.join(map(str, sorted(users)))}" if users else "several stages"
    return InputError(
        f"plan.axes.shard is {plan.axes.shard} and cannot divide {name}: {where} use it, and {plan.pipeline.schedule}"
        f" has some of them on one rank; choose the schedule {others}, or replicate in the place of shard"
    )


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
