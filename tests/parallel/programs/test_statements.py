"""Forward passes that write in place, index, call custom functions or register hooks train the same model under plans
that divide the sequence, or are refused with the line of the model's code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.parallelize import parallelize
from tests.parallel.programs import kept_functions, statements, two_views
from tests.parallel.programs.models import loss_of, make_batches, make_model
from tests.parallel.programs.statements import STATEMENTS
from tests.ranks import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 2 sequence": {"axes": {"tensor": 2}, "modules": {"sequence": True}},
    "context 2": {"axes": {"context": 2}},
}
REFUSED = {**statements.REFUSED, **two_views.REFUSED, **kept_functions.REFUSED}
FILES = (statements.__file__, two_views.__file__, kept_functions.__file__)
Weights = dict[str, torch.Tensor]


def train_alone(name: str) -> Weights:
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens, targets in make_batches():
        optimizer.zero_grad()
        loss_of(model(tokens), targets).backward()
        optimizer.step()
    return dict(model.state_dict())


def train_under_plan(rank: int, world_size: int, fields: dict[str, Any], names: list[str]) -> dict[str, Weights | str]:
    """For each statement, the weights after training, or the text of the error."""
    results: dict[str, Weights | str] = {}
    for name in names:
        model = make_model(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = Plan.model_validate(fields)
        try:
            session = parallelize(
                model, optimizer, loss=loss_of, plan=plan, sample_batch=make_batches()[0], device="cpu"
            )
            for batch in make_batches():
                session.step(batch)
            results[name] = {key: value.clone() for key, value in session.state_dict().items()}
        except InputError as error:
            results[name] = str(error)
    return results


def who_runs(plan: str, name: str) -> str:
    """The target that runs the statement under this plan. Each is run under one of the plans that divide the sequence,
    every tenth of them by `make test` and the others by `make test-proofs`, and every fifth under the other plan, which
    leaves statements as they are. The rest is run by the soak."""
    number = list(STATEMENTS).index(name)
    if plan == "tensor 2":
        return "proofs" if number % 5 == 0 else "soak"
    if plan != ("tensor 2 sequence", "context 2")[number % 2]:
        return "soak"
    return "core" if number % 20 in (0, 1) else "proofs"


MARKS = {"core": [pytest.mark.core], "proofs": [], "soak": [pytest.mark.soak]}
CASES = {(plan, who_runs(plan, name)) for plan in PLANS for name in STATEMENTS}


@pytest.mark.parametrize(
    ("plan", "target"), [pytest.param(plan, target, marks=MARKS[target]) for plan, target in sorted(CASES)]
)
def test_statements_train_the_same_model_or_are_refused(plan: str, target: str) -> None:
    names = [name for name in STATEMENTS if who_runs(plan, name) == target]
    result = run_ranks(train_under_plan, 2, PLANS[plan], names)[0]
    assert list(result) == names
    is_divided = plan != "tensor 2"
    problems = []
    for name, weights in result.items():
        if isinstance(weights, str):
            expected = REFUSED.get(name) if is_divided else None
            names_line = any(f"{Path(file).name}, line " in weights for file in FILES)
            problems += [] if expected and expected in weights and names_line else [f"{name}: {weights}"]
            continue
        expected_weights = train_alone(name)
        error = max(
            float((weights[key] - value).abs().max() / value.abs().max()) for key, value in expected_weights.items()
        )
        problems += [f"{name}: weights are {error:.1e} off"] if not error < 1e-12 else []
    assert not problems, "\n".join(problems)
