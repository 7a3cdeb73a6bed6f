"""What a reader of a proof must know of how it was made."""

from meshwright.proof.question import PLAIN, Question
from meshwright.proof.reference.setting import Setting


def notes(question: Question, setting: Setting, groups: str | None) -> tuple[str, ...]:
    said = []
    plan = question.plan
    if plan.world_size == 1:
        said.append("one rank: nothing that ranks do together was compared")
    if plan.numerics.precision != "fp32" and not question.rounds:
        said.append(f"compared in {question.dtype}: the plan's {plan.numerics.precision} is left out")
    left_out = [name for name, plain in PLAIN.items() if getattr(plan.gradients, name) != plain]
    said += [f"compared without gradients.{name}, which trains otherwise than one device" for name in left_out]
    if setting.dropped:
        places = "place" if setting.dropped == 1 else "places"
        said.append(f"dropout is off for the comparison (in {setting.dropped} {places})")
    elif question.dropout:
        said.append("dropout is on: plans that divide activations draw other masks than one device, and differ")
    if groups:
        said.append(groups)
    return tuple(said)
