"""Runs a case of the matrix: a proof in running ranks, then an evaluation under the plan, which must equal that of the
user's model with the trained weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.proof.proof import Proof
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.proof.reference.reference_setup import ReferenceSetup, build_setup, default_dtype
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.train.session import Session
from tests.proof.matrix import plan_of
from tests.ranks import RankPool
from tests.zoo import BATCH, SAMPLES, ZOO, RandomSamples

Worlds = Callable[[int], RankPool]
TOLERANCE = 1e-9
CLIP_NORM = 0.05  # far below the gradient norm of any of these models


@dataclass(frozen=True)
class CaseResult:
    """The proof, the metrics of the evaluation and the trained weights, as rank 0 has them."""

    proof: Proof
    metrics: dict[str, float]
    state: dict[str, Any]


def matrix_request(kind: str, case: str | Plan, batch: int = BATCH) -> ProofRequest:
    """The request to prove one kind of model under a case of the matrix, or under a plan."""
    torch.manual_seed(0)
    workload = ZOO[kind]
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    user_model = UserModel(
        model, optimizer, workload.loss, RandomSamples(workload.data), batch, clip_norm=CLIP_NORM, seed=3
    )
    return ProofRequest(user_model, plan_of(kind, case) if isinstance(case, str) else case)


def prove_only(rank: int, size: int, request: ProofRequest, folder: Path) -> Proof | None:
    return prove_in_running_ranks(request, _world(rank, size, "cpu"), folder)


def run_case(rank: int, size: int, kind: str, case: str, folder: Path, device: str) -> CaseResult | None:
    """Runs in every rank. Returns the result on rank 0."""
    sessions: list[Session] = []  # the one that the proof trains
    request = replace(matrix_request(kind, case), prepare_session=sessions.append)
    proof = prove_in_running_ranks(request, _world(rank, size, device), folder)
    (session,) = sessions
    setup = build_setup(request)
    with default_dtype(setup.dtype):
        metrics = session.evaluate(data_in_dtype(setup), batch=10)
        state = {name: value.cpu() for name, value in session.state_dict().items()}
    if proof is None or metrics is None:
        return None
    return CaseResult(proof, metrics, state)


def prove_case(worlds: Worlds, kind: str, case: str, folder: Path, device: str = "cpu") -> None:
    """Asserts that a kind of model trains and evaluates under a case as on one device."""
    size = plan_of(kind, case).world_size
    result = worlds(size).run(run_case, kind, case, folder, device)[0]
    assert result.proof.equal, result.proof.first_difference
    assert result.proof.max_relative_error <= TOLERANCE
    assert result.proof.steps == 3
    assert result.proof.device == device
    assert result.metrics["loss"] == pytest.approx(one_device_loss(kind, result.state), rel=TOLERANCE)


def by_size(cases: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The cases ordered by number of ranks, so that every world is started once."""
    return sorted(cases, key=lambda pair: plan_of(*pair).world_size)


def _world(rank: int, size: int, device: str) -> World:
    return World(rank, rank, size, size, 0, torch.device(device, 0) if device == "cuda" else torch.device(device), None)


def data_in_dtype(setup: ReferenceSetup) -> list[Any]:
    """The data in the precision of the comparison."""

    def cast(value: Any) -> Any:
        return value.to(setup.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return [tree_map(cast, setup.data[index]) for index in range(SAMPLES)]


def one_device_loss(kind: str, state: dict[str, Any]) -> float:
    """The loss over all samples of the user's model with these weights."""
    setup = build_setup(matrix_request(kind, "R1"))
    setup.model.load_state_dict(state)
    setup.model.eval()
    data = default_collate(data_in_dtype(setup))
    with torch.no_grad(), default_dtype(setup.dtype):
        output = setup.model(*data[:-1])
        assert setup.loss is not None
        loss = setup.loss(output, data[-1])
    return float(loss[0] / loss[1]) if isinstance(loss, tuple) else float(loss)
