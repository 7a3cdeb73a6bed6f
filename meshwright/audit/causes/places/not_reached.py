"""The cause `not_reached`: a parameter has no gradient on one side, or one of zeros."""

from meshwright.audit.causes.updates.simulate import options_of
from meshwright.audit.causes.wording import list_names, list_ranks
from meshwright.audit.evidence import Evidence, Verdict
from meshwright.audit.recorded_run import RecordedRun

_PARTLY = 2.0


def not_reached(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if parameters have a gradient on one side only. If others differ, too, it explains a part."""
    texts, explained = [], set()
    sides = ((evidence.candidate, "the candidate", True), (evidence.reference, "the reference", False))
    for run, who, is_candidate in sides:
        for names, text in _missing(evidence, run, is_candidate):
            explained |= set(names)
            texts.append(f"{list_names(names)} {'has' if len(names) == 1 else 'have'} {text.format(who=who)}")
    if not texts:
        return None
    left = [name for name in evidence.differing_gradients if name not in explained]
    also = f". The gradients of {list_names(left)} differ, too" if left else ""
    return Verdict("not_reached", "; ".join(texts) + also, _PARTLY if left else 0.0)


def _missing(evidence: Evidence, run: RecordedRun, is_candidate: bool) -> list[tuple[list[str], str]]:
    """Names without a gradient, by the reason that the record shows, with a text."""
    groups: dict[str, list[str]] = {}
    optimized = options_of(run)
    for name in evidence.differing_gradients:
        right, own = evidence.expected(name), evidence.recorded(name)
        here, there = (own, right) if is_candidate else (right, own)
        if there is None or not bool(there.abs().max() > 0 if there.numel() else False):
            continue
        text = None
        if here is None and not (is_candidate and evidence.recorded_parts(name)):
            text = _reason(run, name, name in optimized)
        elif here is not None and not bool(here.any()):
            text = "a gradient of zeros in {who}: something cuts it off (a detach, a branch that is not used)"
        elif is_candidate:
            zero = [part.rank for part in evidence.recorded_parts(name) if _is_zero_part(evidence, name, part)]
            if zero:
                text = "a gradient of zeros on " + list_ranks(zero) + " of {who}"
        if text is not None:
            groups.setdefault(text, []).append(name)
    return [(names, text) for text, names in groups.items()]


def _is_zero_part(evidence: Evidence, name: str, part: object) -> bool:
    expected = evidence.expected(name)
    region, value = part.region, part.value  # type: ignore[attr-defined]
    return expected is not None and not bool(value.any()) and bool(region.of(expected).any())


def _reason(run: RecordedRun, name: str, optimized: bool) -> str:
    entry = run.parameters.get(name)
    if entry is not None and not entry["trained"]:
        return "no gradient in {who}, where requires_grad is off"
    if not optimized:
        return "no gradient in {who}, whose optimizers do not have it"
    return "no gradient in {who}, although an optimizer has it: no loss reaches it, or it was cleared before the step"
