"""How a case of the matrix is tried: a proof in ranks that are there already, then an evaluation, and the weights back
in the untouched model, which must say the same."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from meshwright.launch.place import Place
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.proof.proof import Proof
from meshwright.proof.prove import prove_in
from meshwright.proof.question import OwnModel, Question
from meshwright.proof.record.record import make_session
from meshwright.proof.reference.setting import Setting, computing_in, set_up
from tests.proof.matrix import plan_of
from tests.ranks import RankPool
from tests.zoo import BATCH, SAMPLES, ZOO, Made

Worlds = Callable[[int], RankPool]
TOLERANCE = 1e-9
CLIP = 0.05  # far below any of these gradients' norms


@dataclass(frozen=True)
class Tried:
    """What rank 0 has found."""

    proof: Proof
    evaluated: dict[str, float]
    state: dict[str, Any]


def asked(kind: str, case: str | Plan, batch: int = BATCH) -> Question:
    torch.manual_seed(0)
    made = ZOO[kind]
    model = made.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    own = OwnModel(model, optimizer, made.loss, Made(made.data), batch, clip_norm=CLIP, seed=3)
    return Question(own, plan_of(kind, case) if isinstance(case, str) else case)


def prove_only(rank: int, size: int, question: Question, folder: Path) -> Proof | None:
    return prove_in(question, _world(rank, size, "cpu"), folder)


def try_case(rank: int, size: int, kind: str, case: str, folder: Path, device: str) -> Tried | None:
    question, world = asked(kind, case), _world(rank, size, device)
    proof = prove_in(question, world, folder)
    setting = set_up(question)
    session = make_session(setting, question, world, Place.nowhere())
    with computing_in(setting.dtype):
        batches = session.batches(_as_dtype(setting), 1, BATCH)
        session.step(next(batches))
        found = session.evaluate(_as_dtype(setting), batch=10)
        state = {name: value.cpu() for name, value in session.state_dict().items()}
    if proof is None or found is None:
        return None
    return Tried(proof, found, state)


def prove_case(worlds: Worlds, kind: str, case: str, folder: Path, device: str = "cpu") -> None:
    size = plan_of(kind, case).world_size
    found = worlds(size).run(try_case, kind, case, folder, device)[0]
    assert found.proof.equal, found.proof.first_difference
    assert found.proof.max_relative_error <= TOLERANCE
    assert found.proof.steps == 3
    assert found.proof.device == device
    assert found.evaluated["loss"] == pytest.approx(_alone(kind, found.state), rel=TOLERANCE)


def by_size(cases: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """So that every world is started once."""
    return sorted(cases, key=lambda pair: plan_of(*pair).world_size)


def _world(rank: int, size: int, device: str) -> World:
    return World(rank, rank, size, size, 0, torch.device(device, 0) if device == "cuda" else torch.device(device), None)


def _as_dtype(setting: Setting) -> list[Any]:
    """The data in the precision of the comparison."""

    def cast(value: Any) -> Any:
        return value.to(setting.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return [tree_map(cast, setting.data[index]) for index in range(SAMPLES)]


def _alone(kind: str, state: dict[str, Any]) -> float:
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
