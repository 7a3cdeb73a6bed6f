"""For each cause a training with an injected fault: the proof fails and names the cause. Without the hypothesis that
finds it, the cause is not named."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.processes.world import World
from meshwright.proof.causes.diagnose import FIRST, THEN, diagnose
from meshwright.proof.exact_comparison import compare_with_evidence
from meshwright.proof.record.record import record
from meshwright.proof.request import ProofRequest
from tests.proof.cases import proof_request
from tests.proof.causes import expert_faults, faults, sequence_faults, share_faults
from tests.proof.injected_fault import ComparesOwnSamples, InjectedFault, ScaledGradients
from tests.proof.matrix_case import matrix_request
from tests.ranks import RankPool

R2: dict[str, Any] = {"axes": {"replicate": 2}}
S2: dict[str, Any] = {"axes": {"shard": 2}}
T2: dict[str, Any] = {
    "axes": {"tensor": 2},
    "modules": {"splits": {"up": {"kind": "column"}, "down": {"kind": "row"}}},
}
P2: dict[str, Any] = {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2, "cuts": ["norm"]}}
TWICE: dict[str, Any] = {"memory": {"accumulation": 2}}
SYNCHRONIZED: dict[str, Any] = {"numerics": {"batch_norm": "synchronized"}}


@dataclass(frozen=True)
class Control:
    """A request, the fault that breaks its training, and the cause that must be named; `words` are a part of the
    explanation."""

    cause: str
    request: ProofRequest
    fault: InjectedFault
    words: str = ""

    def __str__(self) -> str:
        return f"{self.cause} {self.request.plan.summary()} {type(self.fault).__name__}"


def plain(plan: dict[str, Any], **options: Any) -> ProofRequest:
    return proof_request("plain", optimizer="sgd", plan=plan, **{"steps": 2, **options})


def comparing(plan: dict[str, Any]) -> ProofRequest:
    return proof_request("plain", loss="spread", optimizer="sgd", plan=plan, steps=2)


def following(plan: dict[str, Any]) -> ProofRequest:
    return proof_request("following", optimizer="sgd", plan=plan, steps=2)


def dividing(model: str, plan: dict[str, Any]) -> ProofRequest:
    return proof_request(model, optimizer="sgd", plan=plan, steps=2)


def normalized(plan: dict[str, Any], **options: Any) -> ProofRequest:
    return proof_request("normalized", optimizer="sgd", plan=plan, size=23, **{"steps": 2, **options})


def tying(plan: dict[str, Any]) -> ProofRequest:
    return proof_request("tying", optimizer="sgd", plan=plan, steps=2)


def mixture(case: str) -> ProofRequest:
    return replace(matrix_request("mixture", case), steps=2)


def bert(case: str) -> ProofRequest:
    return replace(matrix_request("bert", case), steps=2)


def gpt(case: str) -> ProofRequest:
    return replace(matrix_request("gpt", case), steps=1)


def prove_and_diagnose(
    rank: int, size: int, request: ProofRequest, folder: Path
) -> tuple[dict[str, Any], str | None] | None:
    """Returns on rank 0 the proof with its cause, and the cause that is named without this cause's hypothesis."""
    record(request, World(rank, rank, size, size, 0, torch.device("cpu"), None), folder)
    if rank:
        return None
    proof, evidence = compare_with_evidence(request, folder, torch.device("cpu"))
    if evidence is None:
        return proof.to_dict(), None
    first = diagnose(evidence)
    without = diagnose(evidence, without=first.cause) if first.cause != "unknown" else first  # type: ignore[arg-type]
    explained = replace(proof, comparison=replace(proof.comparison, first_difference=first))
    return {**explained.to_dict(), "exit_code": explained.exit_code}, without.cause


SWAPPED = faults.SwappedGradients("blocks.0.conv.weight", "blocks.3.conv.weight")
QUICK = [
    Control(
        "different_start", plain(R2), faults.DifferentInitialWeight(), "rank 1 started with another weight head.weight"
    ),
    Control("coupled_samples", comparing(R2), ComparesOwnSamples(), "compared its own samples only"),
    Control("batch_buffer", following(R2), InjectedFault(), "follows the samples of data rank 0"),
    Control("divided_batch", dividing("counting", R2 | TWICE), InjectedFault(), "changes state"),
    Control("wrong_samples", plain(R2), faults.SamplesOfRank0(), "rank 1 computed step 1 on 4 samples, 0 of the 4"),
    Control("not_optimized", plain(R2), faults.MissingInOptimizer(), "no rank has it in its optimizer"),
    Control("local_clip", plain(S2), faults.ClippedByLocalNorm(), "the norm of its own part"),
    Control("lost_tokens", mixture("R2E2"), expert_faults.RowsOnTheWay("lost"), "rows were lost on their way"),
    Control("missing_reduction", plain(R2), faults.NoReplicaReduction(), "not reduced over the replicate axis"),
    Control("doubled_reduction", tying(T2), faults.TensorReducedTwice(), "reduced twice over the tensor axis of 2"),
    Control(
        "scaled", plain(R2), ScaledGradients(2.0), "are 2 times those of one device: the size of the replicate axis"
    ),
    Control(
        "unweighted_shares",
        plain(R2 | {"shares": [5, 3]}),
        faults.MeanOfRankMeans(),
        "all data ranks are averaged with the weight of an even share, 1/2, but the data ranks have 5, 3 samples",
    ),
    Control(
        "uneven_targets", plain(R2, ignored=8), faults.MeanOfRankMeans(), "the mean over data ranks of their own means"
    ),
    Control(
        "batch_norm", normalized(R2 | SYNCHRONIZED), faults.UnsynchronizedBatchNorm(), "of each data rank by itself"
    ),
    Control("tied_drift", tying(P2), faults.DriftingTiedCopy(), "on stages 0 and 1 have different values"),
    Control("randomness", normalized(R2), faults.DropoutOn(), "dropout was left on"),
    Control(
        "low_precision", plain(R2), faults.RoundedLayer("conv"), "what conv computed on rank 0 has 8 bits (bfloat16)"
    ),
    Control("wrong_positions", gpt("C2"), sequence_faults.PositionsFromZero(), "each rank numbers its tokens from 0"),
    Control("unknown", plain(R2), faults.NoisyGradient()),
    Control("unknown", proof_request("attending", plan=R2, steps=1), faults.TransposedGradient("mix.weight")),
    Control("unknown", proof_request("residual", plan=R2, size=23, steps=1), SWAPPED),
    Control("unknown", plain(S2), faults.StaleGradient()),
]
SOAK = [
    Control(
        "unweighted_shares",
        plain(S2 | {"shares": {"samples": [2, 6], "adaptive": True}}, ignored=8),
        faults.MeanOfRankMeans(),
        "all data ranks are averaged with the weight of an even share",
    ),
    Control(
        "unweighted_shares",
        plain(R2 | {"shares": [5, 3]}),
        share_faults.OneRankAsIfEven(),
        "gradients of data rank 1 are averaged with the weight of an even share",
    ),
    Control(
        "expert_gradients",
        mixture("S2E2"),
        expert_faults.ExpertsAveragedOverAll(),
        "also over the 2 ranks of the expert axis",
    ),
    Control("wrong_past", gpt("C2 ring"), sequence_faults.FutureKeys(), "later tokens that another rank has"),
    Control("lost_targets", gpt("C2 ring"), sequence_faults.NoTargetAtBorders(), "each of the 4 pieces"),
    Control("lost_tokens", mixture("S2E2"), expert_faults.RowsOnTheWay("doubled"), "rows were doubled on their way"),
    Control(
        "expert_gradients",
        mixture("R2E2"),
        ScaledGradients(2.0, parameter="*.experts.*"),
        "averaged over too few ranks, by a factor of the 2 expert ranks",
    ),
    Control("wrong_past", bert("C2 ring"), sequence_faults.OwnKeysOnly(), "of their own rank only"),
    Control("wrong_past", gpt("C2 ring twice"), sequence_faults.OwnKeysOnly(), "of their own rank only"),
    Control("wrong_positions", bert("C2 ring"), sequence_faults.PositionsFromZero(), "each rank numbers its tokens"),
    Control("lost_targets", bert("C2 twice"), sequence_faults.NoTargetAtBorders(), "each of the 4 pieces"),
    Control("missing_reduction", gpt("C2"), faults.NoAveragerReduction(), "not reduced over the context axis"),
    Control("coupled_samples", comparing(S2), ComparesOwnSamples(), "compared its own samples only"),
    Control("batch_buffer", following(S2), InjectedFault(), "follows the samples of data rank 0"),
    Control("divided_batch", dividing("counting", S2 | TWICE), InjectedFault(), "changes state"),
    Control("divided_batch", dividing("mixing", R2), InjectedFault(), "depends on the others"),
    Control("doubled_reduction", bert("T2"), faults.TensorReducedTwice(), "reduced twice over the tensor axis of 2"),
    Control("tied_drift", bert("P2"), faults.DriftingTiedCopy(), "on stages 0 and 1 have different values"),
    Control(
        "different_start",
        plain(S2),
        faults.DifferentInitialWeight(),
        "the plan's model started with another weight head.weight",
    ),
    Control("different_start", bert("T2"), faults.DifferentInitialWeight("decode.bias")),
    Control("different_start", bert("P2"), faults.DifferentInitialWeight("decode.bias")),
    Control("wrong_samples", plain(S2 | TWICE), faults.SamplesOfRank0(), "rank 1"),
    Control("wrong_samples", bert("T2"), faults.ReorderedSamples(), "in another order"),
    Control("not_optimized", plain(S2), faults.MissingInOptimizer(rank=1), "rank 1 does not have it in its optimizer"),
    Control("not_optimized", plain(R2), faults.MissingInOptimizer(rank=1), "rank 1 does not have it in its optimizer"),
    Control("not_optimized", bert("T2"), faults.MissingInOptimizer("decode.bias"), "no rank has it"),
    Control("local_clip", plain(R2), faults.ClippedBeforeAveraging(0.05), "before they were averaged"),
    Control("local_clip", bert("T2"), faults.ClippedByLocalNorm(), "the norm of its own part"),
    Control("local_clip", bert("P2"), faults.ClippedByLocalNorm(), "the norm of its own part"),
    Control("missing_reduction", plain(S2), faults.NoShardReduction(), "not reduced over the shard axis"),
    Control(
        "missing_reduction", plain(R2), faults.NoLossReduction(), "the loss is not reduced over the replicate axis"
    ),
    Control("missing_reduction", bert("T2"), faults.PartialTensorSums(), "not reduced over the tensor axis"),
    Control("missing_reduction", bert("P2"), faults.NoTiedReduction(), "not reduced over the pipeline axis"),
    Control("doubled_reduction", bert("P2"), faults.TiedReducedTwice(), "reduced twice over the pipeline axis of 2"),
    Control("scaled", plain(S2), ScaledGradients(0.5), "one divided by the size of the shard axis"),
    Control(
        "scaled",
        tying(T2),
        ScaledGradients(2.0),
        "all gradients are 2 times those of one device: the size of the tensor",
    ),
    Control("scaled", tying(P2 | TWICE), ScaledGradients(0.25), "one divided by the number of microbatches"),
    Control("scaled", plain(R2, steps=1), ScaledGradients(1.01, rank=1), "on rank 1 are 1.01 times"),
    Control(
        "uneven_targets", plain(S2, ignored=8), faults.MeanOfRankMeans(), "the mean over data ranks of their own means"
    ),
    Control(
        "batch_norm", normalized(S2 | SYNCHRONIZED), faults.UnsynchronizedBatchNorm(), "of each data rank by itself"
    ),
    Control("batch_norm", normalized(R2), faults.SynchronizedBatchNorm(), "of all data ranks together"),
    Control("batch_norm", normalized(S2), faults.ScaledRunningMean(), "norm.running_mean is"),
    Control(
        "batch_norm", normalized(R2), faults.StatisticsOfLastRank(), "learnt from data rank 1's samples, not from 0's"
    ),
    Control(
        "randomness", replace(bert("T2"), dropout=True), InjectedFault(), "other ones change one device's gradients by"
    ),
    Control("randomness", normalized(S2 | TWICE), faults.DropoutOn(), "dropout was left on"),
    Control("randomness", normalized(R2), faults.DropoutOn(rank=1), "rank 1 drew random numbers"),
    Control("randomness", bert("T2"), faults.DropoutOn()),
    Control(
        "low_precision",
        proof_request("casting", plan=R2),
        InjectedFault(),
        "the model's own code computes with 24 bits",
    ),
    Control("low_precision", plain(S2), faults.RoundedLayer("conv", torch.float32), "has 24 bits (float32)"),
    Control("low_precision", plain(R2), faults.RoundedGradients(), "rounded on their way"),
    Control("unknown", plain(S2), faults.NoisyGradient()),
    Control("unknown", bert("T2"), faults.NoisyGradient("decode.bias")),
]
SOAK_OF_FOUR = [
    Control("expert_gradients", mixture("R4E2"), expert_faults.CopiesOfExpertsAlone(), "the 2 ranks that hold copies"),
    Control("lost_tokens", mixture("R2P2E2"), expert_faults.RowsOnTheWay("lost"), "rows were lost on their way"),
    Control("tied_drift", bert("R2P2"), faults.DriftingTiedCopy(), "on stages 0 and 1"),
    Control("tied_drift", bert("S2P2"), faults.DriftingTiedCopy(), "on stages 0 and 1"),
    Control("missing_reduction", bert("R2T2"), faults.NoAveragerReduction(), "not reduced over the replicate axis"),
    Control("doubled_reduction", bert("R2T2"), faults.TensorReducedTwice(), "over the tensor axis of 2"),
    Control("scaled", bert("R2S2"), ScaledGradients(4.0), "the number of data ranks"),
]


def check(pool: RankPool, folder: Path, control: Control) -> None:
    proof, without = pool.run(prove_and_diagnose, replace(control.request, prepare_session=control.fault), folder)[0]
    assert not proof["equal"]
    assert proof["exit_code"] == 3
    first = proof["first_difference"]
    assert first["cause"] == control.cause, first
    assert control.words in first["explanation"], first
    if control.cause == "unknown":
        assert first["ruled_out"] == [*FIRST, *THEN]
    else:
        assert without != control.cause, "another hypothesis names the same cause"
        assert control.cause not in first["ruled_out"]


@pytest.mark.parametrize("control", QUICK, ids=str)
def test_a_cause_is_named(two: RankPool, tmp_path: Path, control: Control) -> None:
    check(two, tmp_path, control)


@pytest.mark.soak
@pytest.mark.parametrize("control", SOAK, ids=str)
def test_a_cause_is_named_on_other_axes(two: RankPool, tmp_path: Path, control: Control) -> None:
    check(two, tmp_path, control)


@pytest.mark.soak
@pytest.mark.parametrize("control", SOAK_OF_FOUR, ids=str)
def test_a_cause_is_named_in_plans_of_two_axes(four: RankPool, tmp_path: Path, control: Control) -> None:
    check(four, tmp_path, control)


LONG = ("expert_gradients", "wrong_past", "lost_targets")  # causes of models whose proofs take seconds


def test_every_cause_has_controls_on_two_plans() -> None:
    controls = [*QUICK, *SOAK, *SOAK_OF_FOUR]
    for cause in (*FIRST, *THEN):
        plans = {control.request.plan.summary() for control in controls if control.cause == cause}
        assert len(plans) > 1, cause
        assert cause in {*(control.cause for control in QUICK), *LONG}, cause
