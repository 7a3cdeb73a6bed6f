"""For each cause a training that is broken on purpose: the proof fails and names it. And without the hypothesis that
finds it, it is not named."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.launch.world import World
from meshwright.proof.causes.diagnose import FIRST, THEN, diagnose
from meshwright.proof.examine import compared
from meshwright.proof.fault import Fault, Plant
from meshwright.proof.question import Question
from meshwright.proof.record.record import record
from tests.proof.cases import question
from tests.proof.causes import faults
from tests.proof.tried import asked as zoo
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
    """`said` are words of the explanation."""

    cause: str
    question: Question
    fault: Fault
    said: str = ""

    def __str__(self) -> str:
        return f"{self.cause} {self.question.plan.summary()} {type(self.fault).__name__}"


def plain(plan: dict[str, Any], **more: Any) -> Question:
    return question("plain", optimizer="sgd", plan=plan, **{"steps": 2, **more})


def normalized(plan: dict[str, Any], **more: Any) -> Question:
    return question("normalized", optimizer="sgd", plan=plan, size=23, **{"steps": 2, **more})


def tying(plan: dict[str, Any]) -> Question:
    return question("tying", optimizer="sgd", plan=plan, steps=2)


def bert(case: str) -> Question:
    return replace(zoo("bert", case), steps=2)


def told(rank: int, size: int, asked: Question, folder: Path) -> tuple[dict[str, Any], str | None] | None:
    """The proof with its cause, and the cause where nobody asks for that one."""
    record(asked, World(rank, rank, size, size, 0, torch.device("cpu"), None), folder)
    if rank:
        return None
    proof, evidence = compared(asked, folder, torch.device("cpu"))
    if evidence is None:
        return proof.to_dict(), None
    first = diagnose(evidence)
    without = diagnose(evidence, without=first.cause) if first.cause != "unknown" else first  # type: ignore[arg-type]
    named = replace(proof, comparison=replace(proof.comparison, first=first))
    return {**named.to_dict(), "exit_code": named.exit_code}, without.cause


SWAPPED = faults.Swapped("blocks.0.conv.weight", "blocks.3.conv.weight")
QUICK = [
    Control("different_start", plain(R2), faults.OtherStart(), "rank 1 started with another weight head.weight"),
    Control("wrong_samples", plain(R2), faults.SamplesOfTheFirst(), "rank 1 computed step 1 on 4 samples, 0 of the 4"),
    Control("not_optimized", plain(R2), faults.NotHeld(), "no rank has it in its optimizer"),
    Control("local_clip", plain(S2), faults.ClippedApart(), "the norm of its own part"),
    Control("missing_reduction", plain(R2), faults.NotReplicated(), "not reduced over the replicate axis"),
    Control("doubled_reduction", tying(T2), faults.CommonSummedTwice(), "reduced twice over the tensor axis of 2"),
    Control("scaled", plain(R2), Plant(2.0), "are 2 times those of one device: the size of the replicate axis"),
    Control("uneven_targets", plain(R2, ignored=8), faults.OwnMeans(), "the mean over data ranks of their own means"),
    Control("batch_norm", normalized(R2 | SYNCHRONIZED), faults.NormalizedAlone(), "of each data rank by itself"),
    Control("tied_drift", tying(P2), faults.TiedDrifts(), "on stages 0 and 1 have different values"),
    Control("randomness", normalized(R2), faults.DropoutOn(), "dropout was left on"),
    Control("low_precision", plain(R2), faults.Rounded("conv"), "what conv computed on rank 0 has 8 bits (bfloat16)"),
    Control("unknown", plain(R2), faults.Noise()),
    Control("unknown", question("attending", plan=R2, steps=1), faults.Transposed("mix.weight")),
    Control("unknown", question("residual", plan=R2, size=23, steps=1), SWAPPED),
    Control("unknown", plain(S2), faults.Stale()),
]
SOAK = [
    Control("doubled_reduction", bert("T2"), faults.CommonSummedTwice(), "reduced twice over the tensor axis of 2"),
    Control("tied_drift", bert("P2"), faults.TiedDrifts(), "on stages 0 and 1 have different values"),
    Control(
        "different_start", plain(S2), faults.OtherStart(), "the plan's model started with another weight head.weight"
    ),
    Control("different_start", bert("T2"), faults.OtherStart("decode.bias")),
    Control("different_start", bert("P2"), faults.OtherStart("decode.bias")),
    Control("wrong_samples", plain(S2 | TWICE), faults.SamplesOfTheFirst(), "rank 1"),
    Control("wrong_samples", bert("T2"), faults.Shuffled(), "in another order"),
    Control("not_optimized", plain(S2), faults.NotHeld(rank=1), "rank 1 does not have it in its optimizer"),
    Control("not_optimized", plain(R2), faults.NotHeld(rank=1), "rank 1 does not have it in its optimizer"),
    Control("not_optimized", bert("T2"), faults.NotHeld("decode.bias"), "no rank has it"),
    Control("local_clip", plain(R2), faults.ClippedBefore(0.05), "before they were averaged"),
    Control("local_clip", bert("T2"), faults.ClippedApart(), "the norm of its own part"),
    Control("local_clip", bert("P2"), faults.ClippedApart(), "the norm of its own part"),
    Control("missing_reduction", plain(S2), faults.NotScattered(), "not reduced over the shard axis"),
    Control("missing_reduction", plain(R2), faults.LossNotReduced(), "the loss is not reduced over the replicate axis"),
    Control("missing_reduction", bert("T2"), faults.PartsOfASum(), "not reduced over the tensor axis"),
    Control("missing_reduction", bert("P2"), faults.TiedNotSummed(), "not reduced over the pipeline axis"),
    Control("doubled_reduction", bert("P2"), faults.TiedSummedTwice(), "reduced twice over the pipeline axis of 2"),
    Control("scaled", plain(S2), Plant(0.5), "one divided by the size of the shard axis"),
    Control("scaled", tying(T2), Plant(2.0), "all gradients are 2 times those of one device: the size of the tensor"),
    Control("scaled", tying(P2 | TWICE), Plant(0.25), "one divided by the number of microbatches"),
    Control("scaled", plain(R2, steps=1), Plant(1.01, rank=1), "on rank 1 are 1.01 times"),
    Control("uneven_targets", plain(S2, ignored=8), faults.OwnMeans(), "the mean over data ranks of their own means"),
    Control("batch_norm", normalized(S2 | SYNCHRONIZED), faults.NormalizedAlone(), "of each data rank by itself"),
    Control("batch_norm", normalized(R2), faults.NormalizedTogether(), "of all data ranks together"),
    Control("batch_norm", normalized(S2), faults.StatisticsOff(), "norm.running_mean is"),
    Control(
        "batch_norm", normalized(R2), faults.StatisticsOfTheLast(), "learnt from data rank 1's samples, not from 0's"
    ),
    Control("randomness", replace(bert("T2"), dropout=True), Fault(), "other ones change one device's gradients by"),
    Control("randomness", normalized(S2 | TWICE), faults.DropoutOn(), "dropout was left on"),
    Control("randomness", normalized(R2), faults.DropoutOn(rank=1), "rank 1 drew random numbers"),
    Control("randomness", bert("T2"), faults.DropoutOn()),
    Control("low_precision", question("casting", plan=R2), Fault(), "the model's own code computes with 24 bits"),
    Control("low_precision", plain(S2), faults.Rounded("conv", torch.float32), "has 24 bits (float32)"),
    Control("low_precision", plain(R2), faults.RoundedOnTheWay(), "rounded on their way"),
    Control("unknown", plain(S2), faults.Noise()),
    Control("unknown", bert("T2"), faults.Noise("decode.bias")),
]
SOAK_OF_FOUR = [
    Control("tied_drift", bert("R2P2"), faults.TiedDrifts(), "on stages 0 and 1"),
    Control("tied_drift", bert("S2P2"), faults.TiedDrifts(), "on stages 0 and 1"),
    Control("missing_reduction", bert("R2T2"), faults.NotCombined(), "not reduced over the replicate axis"),
    Control("doubled_reduction", bert("R2T2"), faults.CommonSummedTwice(), "over the tensor axis of 2"),
    Control("scaled", bert("R2S2"), Plant(4.0), "the number of data ranks"),
]


def check(pool: RankPool, folder: Path, control: Control) -> None:
    answer = pool.run(told, replace(control.question, plant=control.fault), folder)[0]
    proof, without = answer
    assert not proof["equal"]
    assert proof["exit_code"] == 3
    first = proof["first_difference"]
    assert first["cause"] == control.cause, first
    assert control.said in first["explanation"], first
    if control.cause == "unknown":
        assert first["ruled_out"] == [*FIRST, *THEN]
    else:
        assert without != control.cause, "another hypothesis says the same"
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
def test_a_cause_is_named_beside_another_axis(four: RankPool, tmp_path: Path, control: Control) -> None:
    check(four, tmp_path, control)


def test_every_cause_has_controls_on_two_plans() -> None:
    controls = [*QUICK, *SOAK, *SOAK_OF_FOUR]
    for cause in (*FIRST, *THEN):
        plans = {control.question.plan.summary() for control in controls if control.cause == cause}
        assert len(plans) > 1, cause
        assert cause in {control.cause for control in QUICK}, cause
