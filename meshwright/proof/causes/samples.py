"""Ranks that saw the wrong samples."""

from collections import Counter
from collections.abc import Iterable

from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.train.output.witness import Witness


def wrong_samples(evidence: Evidence) -> Verdict | None:
    """Every sample a rank computed on has a digest: they are held against what the order of samples gives its data
    rank, microbatch by microbatch; those of another run against all that its ranks computed on."""
    if evidence.reference is not None:
        return _of_another_run(evidence)
    right = evidence.lab.samples
    for witness in evidence.seen:
        own = right[witness.data_rank]
        given = tuple(tuple(part) for part in witness.samples)
        if given == own:
            continue
        mine = {sample for part in own for sample in part}
        others = {sample for rank in right for part in rank for sample in part} - mine
        computed = [sample for part in given for sample in part]
        strange = [sample for sample in computed if sample not in mine]
        theirs = sum(sample in others for sample in strange)
        words = (
            f"rank {witness.rank} computed step {evidence.step} on {len(computed)} samples,"
            f" {len(computed) - len(strange)} of the {len(mine)} that are its own"
        )
        if theirs:
            words += f" and {theirs} of other ranks"
        if len(strange) > theirs:
            words += f"; {len(strange) - theirs} are in no rank's part of this batch, or were changed on the way"
        if not strange:
            words += ", but in other microbatches, more than once or in another order"
        return Verdict("wrong_samples", words)
    return None


def _of_another_run(evidence: Evidence) -> Verdict | None:
    there, here = _computed(evidence.reference_seen), _computed(evidence.seen)
    missing, strange = there - here, here - there
    if not missing and not strange:
        return None
    return Verdict(
        "wrong_samples",
        f"of the {there.total()} samples that the first run computed step {evidence.step} on, the second one lacked"
        f" {missing.total()}, and it had {strange.total()} others",
    )


def _computed(seen: Iterable[Witness]) -> Counter[str]:
    """Every sample with weight, once for each data rank that computed on it."""
    by_rank = {witness.data_rank: witness for witness in seen}.values()
    return Counter(
        sample
        for witness in by_rank
        for part, counted in zip(witness.samples, witness.counted, strict=True)
        for sample in part
        if counted
    )
