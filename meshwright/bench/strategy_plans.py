"""The plan of each strategy that the strategies benchmark compares: one axis over all devices."""

from collections.abc import Callable

from meshwright.errors import InputError
from meshwright.plan import Axes, Plan
from meshwright.planner.candidates import Candidate, Layout, plan_of
from meshwright.planner.outline import Outline
from meshwright.planner.profiles import Profiles
from meshwright.planner.question import Question
from meshwright.planner.search import outline_of

Asked = Callable[[], tuple[Question, Profiles]]  # `exact`; the model is traced only for plans that divide it


def plan_for(strategy: str, devices: int, asked: Asked) -> Plan:
    """Raises the reason where the model cannot be divided so."""
    if strategy == "one rank":
        return Plan()
    if devices == 1:
        raise InputError(f"{strategy} needs several devices, and the cluster has one")
    if strategy == "replicate":
        return Plan(axes=Axes(replicate=devices))
    if strategy == "shard":
        return Plan(axes=Axes(shard=devices))
    question, profiles = asked()
    outline = outline_of(question, profiles, "fp32")
    candidate = _split(outline, question) if strategy == "tensor" else _cut(outline, question)
    return plan_of(candidate, outline, question)


def _split(outline: Outline, question: Question) -> Candidate:
    if outline.splits == 0:
        raise InputError("the model has no layers that can be split along the tensor axis")
    batch = question.global_batch
    return Candidate(Layout(tensor=question.cluster.devices), "fp32", "none", "1f1b", 1, 1, batch)


def _cut(outline: Outline, question: Question) -> Candidate:
    """Twice as many microbatches as stages, as far as the batch goes: a third of a step, or less, is waiting."""
    stages, batch = question.cluster.devices, question.global_batch
    if outline.cuts(stages, "none") is None:
        places = sum(piece.cuttable for piece in outline.pieces)
        why = f": {outline.structure.reason}" if outline.structure and outline.structure.reason else ""
        raise InputError(f"the model can be cut in {places} places, too few for {stages} stages{why}")
    count = min(2 * stages, batch)
    return Candidate(Layout(pipeline=stages), "fp32", "none", "1f1b", 1, count, -(-batch // count))
