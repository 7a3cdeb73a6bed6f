"""Every axis and product of axes trains the same model: proved in fp64 for the kinds of models that people train.

Each case: three steps with AdamW, weight decay and clipping that binds, a third of the targets ignored and all of them
together, and a last batch that is short. Then the same plan evaluates every sample, and its weights go back into the
untouched model, which must say the same.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from meshwright.cluster.detect import find
from meshwright.launch.place import Place
from meshwright.launch.world import World
from meshwright.parallel.check import checker
from meshwright.plan import Plan
from meshwright.planner.profiles import Profiles
from meshwright.planner.question import Question as PlanQuestion
from meshwright.planner.search import search
from meshwright.proof.proof import Proof
from meshwright.proof.prove import prove_in
from meshwright.proof.question import OwnModel, Question
from meshwright.proof.record import make_session
from meshwright.proof.setting import Setting, computing_in, set_up
from meshwright.simulator.predict import cost_of
from tests.proof.matrix import COVERING, every, plan_of
from tests.ranks import RankPool, ranks
from tests.zoo import BATCH, SAMPLES, ZOO, Made

Worlds = Callable[[int], RankPool]
TOLERANCE = 1e-9
CLIP = 0.05  # far below any of these gradients' norms


def asked(kind: str, case: str | Plan, batch: int = BATCH) -> Question:
    torch.manual_seed(0)
    made = ZOO[kind]
    model = made.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    own = OwnModel(model, optimizer, made.loss, Made(made.data), batch, clip_norm=CLIP, seed=3)
    return Question(own, plan_of(kind, case) if isinstance(case, str) else case)


def try_case(rank: int, size: int, kind: str, case: str, folder: Path) -> dict[str, Any] | None:
    """On rank 0: the proof, the evaluation and the weights."""
    question, device = asked(kind, case), torch.device("cpu")
    world = World(rank, rank, size, size, 0, device, None)
    proof = prove_in(question, world, folder)
    setting = set_up(question)
    session = make_session(setting, question, world, Place.nowhere())
    with computing_in(setting.dtype):
        batches = session.batches(_as_dtype(setting), 1, BATCH)
        session.step(next(batches))
        found = session.evaluate(_as_dtype(setting), batch=10)
        state = session.state_dict()
    if proof is None:
        return None
    return {"proof": proof.to_dict(), "evaluated": found, "state": state}


def _as_dtype(setting: Setting) -> list[Any]:
    """The data in the precision of the comparison."""

    def cast(value: Any) -> Any:
        return value.to(setting.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return [tree_map(cast, setting.data[index]) for index in range(SAMPLES)]


def alone(kind: str, state: dict[str, torch.Tensor]) -> float:
    """The loss over all samples, of the untouched model with these weights."""
    question = asked(kind, "R1")
    setting = set_up(question)
    setting.model.load_state_dict(state)
    setting.model.eval()
    data = default_collate(_as_dtype(setting))
    with torch.no_grad(), computing_in(setting.dtype):
        output = setting.model(*data[:-1])
        assert setting.loss is not None
        loss = setting.loss(output, data[-1])
    return float(loss[0] / loss[1]) if isinstance(loss, tuple) else float(loss)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """One world of each size, started when a case first wants it."""
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(ranks(size, 300)))


def by_size(pair: Any) -> int:
    kind, case = pair
    return plan_of(kind, case).world_size


def prove_case(worlds: Worlds, kind: str, case: str, folder: Path) -> None:
    size = plan_of(kind, case).world_size
    found = worlds(size).run(try_case, kind, case, folder)[0]
    proof = found["proof"]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= TOLERANCE
    assert proof["steps"] == 3
    assert found["evaluated"]["loss"] == pytest.approx(alone(kind, found["state"]), rel=TOLERANCE)


@pytest.mark.parametrize(("kind", "case"), sorted(COVERING, key=by_size))
def test_a_plan_trains_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "case"), sorted(every(), key=by_size))
def test_every_plan_trains_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


def prove_only(rank: int, size: int, question: Question, folder: Path) -> Proof | None:
    return prove_in(question, World(rank, rank, size, size, 0, torch.device("cpu"), None), folder)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_last_batch_of_fewer_samples_than_microbatches(worlds: Worlds, schedule: str, tmp_path: Path) -> None:
    """The second and last batch has one sample for two microbatches."""
    question = replace(asked("gpt", f"P2 {schedule}", batch=SAMPLES - 1), steps=2)
    proof = worlds(2).run(prove_only, question, tmp_path)[0]
    assert proof.equal, proof.first_difference
    assert proof.max_relative_error <= TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gpt", "resnet", "vgg"])
def test_what_the_planner_proposes_runs_and_trains_the_same_model(worlds: Worlds, kind: str, tmp_path: Path) -> None:
    """The best of every family of plans, on devices with little memory and slow links between two of four."""
    data = Made(ZOO[kind].data)
    sample = default_collate([data[0], data[1]])
    with torch.device("meta"):
        model = ZOO[kind].model()
    refuses = checker(model, sample)
    adamw = cost_of(torch.optim.AdamW(model.parameters()), on_gpu=True)
    question = PlanQuestion(find("2x2xV100-16GB"), BATCH, adamw, exact=True, top=6, refuses=refuses)
    found = search(question, Profiles(model, sample, ZOO[kind].loss))
    plans = [choice.plan for choice in (*found.ranked, *found.others)]
    assert len({plan.axes for plan in plans}) >= 4
    for plan in plans:
        proof = worlds(plan.world_size).run(prove_only, asked(kind, plan), tmp_path)[0]
        assert proof.equal, f"{plan.summary()}: {proof.first_difference}"
        assert proof.max_relative_error <= TOLERANCE


def test_the_covering_set_has_every_axis_pair_and_kind() -> None:
    sizes = [case.split()[0] for _, case in COVERING]
    axes = [{letter for letter in word if letter.isalpha()} for word in sizes]
    assert {kind for kind, _ in COVERING} == set(ZOO)
    for pair in ("RS", "RT", "RP", "ST", "SP", "TP"):
        assert any(set(pair) <= found for found in axes), pair
