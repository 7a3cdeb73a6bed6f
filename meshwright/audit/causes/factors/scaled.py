"""The cause `scaled`: gradients are multiplied by a constant. Says which number of the training the constant is."""

from meshwright.audit.causes.counts import counts_of, describe_factor, recognize
from meshwright.audit.causes.wording import list_names, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict
from meshwright.audit.recorded_run import RecordedRun

_MOST_FACTORS = 3


def scaled(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if all gradients that differ are the reference's times one constant on every rank, or times up
    to three constants which all are numbers of the training."""
    names = evidence.differing_gradients
    if not names:
        return None
    common = evidence.common_factor(names)
    if common is None:
        return None
    factor, uncertainty = common
    worst = max(evidence.scaled_misfit(name, factor) for name in names)
    if not evidence.fits(worst):
        return _several_factors(evidence, names)
    if abs(factor - 1) <= uncertainty:
        return None
    which = f"the gradients of {list_names(names)} are" if evidence.equal_gradients else "all gradients are"
    meaning = describe_factor(factor, uncertainty, counts_of(evidence, names))
    return Verdict(
        "scaled",
        f"{which} {number(factor)} times the reference's on every rank; {meaning}{_losses(evidence, factor)}",
        worst / SLACK,
    )


def _several_factors(evidence: Evidence, names: tuple[str, ...]) -> Verdict | None:
    groups: list[tuple[float, float, list[str]]] = []
    for name in names:
        own = evidence.common_factor([name])
        if own is None:
            return None
        for factor, uncertainty, members in groups:
            if abs(own[0] / factor - 1) <= max(uncertainty, own[1]):
                members.append(name)
                break
        else:
            groups.append((*own, [name]))
    if len(groups) > _MOST_FACTORS:
        return None
    counts, texts, worst = counts_of(evidence), [], 0.0
    for factor, uncertainty, members in groups:
        known = recognize(factor, uncertainty, counts)
        worst = max([worst, *(evidence.scaled_misfit(name, factor) for name in members)])
        if known is None or not evidence.fits(worst):
            return None
        texts.append(f"those of {list_names(members)} {number(factor)} times the reference's, {known}")
    return Verdict("scaled", f"gradients are multiplied by constants: {'; '.join(texts)}", worst / SLACK)


def _losses(evidence: Evidence, factor: float) -> str:
    """Says whether the losses that backward was called on have the factor, too."""
    right, own = (mean_loss(run, evidence.step) for run in (evidence.reference, evidence.candidate))
    if not right or own is None:
        return ""
    if abs(own / right / factor - 1) < 1e-3:
        return f". The losses that backward was called on have the same factor ({number(own)} and {number(right)})"
    if abs(own / right - 1) < 1e-3:
        return f". The losses that backward was called on are equal ({number(own)}), so it comes after them"
    return f". The losses that backward was called on are {number(own)}, the reference's {number(right)}"


def mean_loss(run: RecordedRun, step: int) -> float | None:
    values = [float(event["value"]) for event in run.events("loss", step)]
    return sum(values) / len(values) if values else None
