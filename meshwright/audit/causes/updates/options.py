"""The cause `other_optimizer`: gradients are equal, and the optimizers or their options are not."""

from meshwright.audit.causes.updates.simulate import Options, explains, options_of, simulate
from meshwright.audit.causes.wording import list_names
from meshwright.audit.evidence import Evidence, Verdict

_NOT_COMPUTED = 0.9  # the residual if the update cannot be computed from the options


def other_optimizer(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the first difference is in a weight whose options differ. Where the reference's optimizer is
    one of torch and its update is what its options give, the candidate's must be what its own options give."""
    name = evidence.difference.name
    if evidence.difference.what != "weight" or name is None:
        return None
    right, own = options_of(evidence.reference), options_of(evidence.candidate)
    if name not in right or name not in own:
        return None
    changes = _changes(right[name], own[name])
    if not changes:
        return None
    names = [other for other in own if other in right and _changes(right[other], own[other]) == changes]
    residual = _residual(evidence, name, right[name], own[name])
    if residual is None:
        return None
    return Verdict("other_optimizer", f"the optimizer of {list_names(names)} has {'; '.join(changes)}", residual)


def _changes(right: Options, own: Options) -> list[str]:
    changes = []
    if right.optimizer != own.optimizer:
        changes.append(f"another class, {own.optimizer}, in the reference {right.optimizer}")
    for key, value in own.values.items():
        if key in right.values and right.values[key] != value:
            changes.append(f"{key} {value}, in the reference {right.values[key]}")
    return changes


def _residual(evidence: Evidence, name: str, right: Options, own: Options) -> float | None:
    """None if the updates show that the options are not the reason."""
    expected, recorded = (
        run.whole_plain(evidence.step, "weight", name) for run in (evidence.reference, evidence.candidate)
    )
    if expected is None or recorded is None or expected.shape != recorded.shape:
        return _NOT_COMPUTED
    steps = range(1, evidence.step + 1)
    if not explains(simulate(evidence.reference, name, right, steps), expected, recorded):
        return _NOT_COMPUTED if right.optimizer == own.optimizer else 1.0
    simulated = simulate(evidence.candidate, name, own, steps)
    if simulated is None:
        return _NOT_COMPUTED
    return 0.0 if explains(simulated, recorded, expected) else None
