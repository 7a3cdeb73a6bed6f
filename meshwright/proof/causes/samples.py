"""The cause `wrong_samples`: ranks computed on other samples than they should have."""

from collections import Counter
from collections.abc import Iterable

from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.train.output.observation import RankObservation


def wrong_samples(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if a rank's samples, of which digests were recorded, are not those that its data rank should
    get, microbatch by microbatch and in order. When two runs are compared, all samples of a step are compared instead,
    regardless of which rank computed on them."""
    if evidence.reference_plan is not None:
        return _differ_from_run(evidence)
    expected = evidence.experiments.expected_samples
    for observation in evidence.observations:
        own_microbatches = expected[observation.data_rank]
        microbatches = tuple(tuple(microbatch) for microbatch in observation.sample_digests)
        if microbatches == own_microbatches:
            continue
        own_samples = {sample for microbatch in own_microbatches for sample in microbatch}
        others = {sample for rank in expected for microbatch in rank for sample in microbatch} - own_samples
        computed = [sample for microbatch in microbatches for sample in microbatch]
        foreign = [sample for sample in computed if sample not in own_samples]
        from_others = sum(sample in others for sample in foreign)
        explanation = (
            f"rank {observation.rank} computed step {evidence.step} on {len(computed)} samples,"
            f" {len(computed) - len(foreign)} of the {len(own_samples)} that are its own"
        )
        if from_others:
            explanation += f" and {from_others} of other ranks"
        if len(foreign) > from_others:
            unknown = len(foreign) - from_others
            explanation += f"; {unknown} are in no rank's part of this batch, or were changed after loading"
        if not foreign:
            explanation += ", but in other microbatches, more than once or in another order"
        return Verdict("wrong_samples", explanation)
    return None


def _differ_from_run(evidence: Evidence) -> Verdict | None:
    first, second = _counted_samples(evidence.reference_observations), _counted_samples(evidence.observations)
    missing, foreign = first - second, second - first
    if not missing and not foreign:
        return None
    return Verdict(
        "wrong_samples",
        f"of the {first.total()} samples that the first run computed step {evidence.step} on, the second one lacked"
        f" {missing.total()}, and it had {foreign.total()} others",
    )


def _counted_samples(observations: Iterable[RankObservation]) -> Counter[str]:
    """Counts the digests of all samples that have weight in the loss, once for each data rank that computed on the
    sample."""
    by_data_rank = {observation.data_rank: observation for observation in observations}.values()
    return Counter(
        sample
        for observation in by_data_rank
        for microbatch, counted in zip(observation.sample_digests, observation.counted_samples, strict=True)
        for sample in microbatch
        if counted
    )
