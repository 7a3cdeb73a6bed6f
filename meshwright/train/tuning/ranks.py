"""Tunes a plan in ranks that run already, each in its own process (in_process.py): those of `mw.best_plan`, and those
of `meshwright train` that another launcher has started."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.messages.exchange import broadcast_value
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Compute
from meshwright.processes.world import World
from meshwright.train.tuning.in_process import MakeSession, TakeBatches, measure_in_process
from meshwright.train.tuning.kept import KeptChoice, load_choice, save_choice
from meshwright.train.tuning.variants import Variant, fastest_variant, kept_plan


@dataclass(frozen=True)
class TuningRequest:
    """What rank 0 wants to be timed: the variants of a plan within a budget. `file` is where the choice is kept on
    rank 0, and `compile_s` the expected seconds of compiling."""

    variants: Sequence[Variant]
    budget_s: float
    compile_s: float
    file: Path


def tune_in_ranks(
    plan: Plan,
    request: TuningRequest | None,
    make_session: MakeSession,
    batches: TakeBatches,
    world: World,
    notify: Callable[[str], None],
) -> Plan:
    """Returns the plan with the `compute` fields of the fastest variant, the same on all ranks, which call this
    together. `request` is that of rank 0, and not used on others; None if nothing is to be measured. `notify` is
    called on rank 0."""
    known = load_choice(request.file, request.budget_s) if request is not None and world.rank == 0 else None
    message = broadcast_value(_to_plain(request, known) if world.rank == 0 else None) if world.size > 1 else None
    file = request.file if request is not None else None
    if message is not None:
        request, known = _from_plain(message, plan)
    if request is None:
        return plan
    tell = notify if world.rank == 0 else _ignore
    if known is not None and (kept := kept_plan(plan, request.variants, known.compute)) is not None:
        tell(f"{known.line} (in an earlier run)")
        return kept
    measure = measure_in_process(make_session, batches, world)
    choice = fastest_variant(plan, request.variants, measure, request.budget_s, request.compile_s, tell)
    if choice.line:
        tell(choice.line)
    if choice.is_measured and file is not None:
        budget_s = None if choice.is_complete else request.budget_s
        save_choice(file, KeptChoice(choice.plan.compute, choice.line, budget_s))
    return choice.plan


def _ignore(line: str) -> None:
    pass


def _to_plain(request: TuningRequest | None, known: KeptChoice | None) -> dict[str, Any]:
    if request is None:
        return {}
    variants = [[variant.plan.compute.model_dump(mode="json"), variant.predicted_s] for variant in request.variants]
    kept = None if known is None else [known.compute.model_dump(mode="json"), known.line]
    return {"variants": variants, "budget_s": request.budget_s, "compile_s": request.compile_s, "known": kept}


def _from_plain(message: dict[str, Any], plan: Plan) -> tuple[TuningRequest | None, KeptChoice | None]:
    if not message:
        return None, None
    variants = [
        Variant(plan.model_copy(update={"compute": Compute.model_validate(compute)}), predicted_s)
        for compute, predicted_s in message["variants"]
    ]
    known = message["known"]
    kept = None if known is None else KeptChoice(Compute.model_validate(known[0]), known[1], None)
    return TuningRequest(variants, message["budget_s"], message["compile_s"], Path()), kept
