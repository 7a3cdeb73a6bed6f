"""`start: random`: weights under which a proof finds faults that a usual initialization hides."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.prove import check_request
from meshwright.proof.reference.random_start import redraw_weights
from meshwright.proof.reference.reference_setup import build_setup
from meshwright.proof.request import ProofRequest, UserModel
from tests.proof.cases import Points, prove_in_pool
from tests.proof.injected_fault import ScaledGradients
from tests.ranks import RankPool


class Parts(nn.Module):
    """Layers as people initialize them: zeros, ones and small numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 64, padding_idx=3)
        self.conv, self.norm = nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64)
        self.head, self.frozen = nn.Linear(64, 10, bias=False), nn.Linear(2, 2)
        self.head.weight = self.embed.weight
        self.experts = nn.Parameter(torch.zeros(4, 64, 32))
        self.gate = nn.Parameter(torch.zeros(()))
        self.phases = nn.Parameter(torch.zeros(128, dtype=torch.complex64))
        self.frozen.requires_grad_(False)
        nn.init.zeros_(self.conv.weight)


def drawn(seed: int = 1) -> Parts:
    torch.manual_seed(0)
    model = Parts()
    redraw_weights(model, seed)
    return model


def test_no_part_is_negligible() -> None:
    model = drawn()
    fan_in = {"conv.weight": 16 * 9, "experts": 64, "embed.weight": 64}
    for name, parameter in model.named_parameters():
        if name.startswith("frozen") or name == "gate":
            continue
        mean = 1.0 if name == "norm.weight" else 0.0
        deviation = fan_in[name] ** -0.5 if name in fan_in else 0.3
        offsets = (parameter - mean).detach()
        assert offsets.abs().square().mean().sqrt().item() == pytest.approx(deviation, rel=0.7), name
        assert abs(offsets.mean()) < deviation / 2, name
    assert model.norm.weight.min().item() > 0
    assert model.gate.item() != 0
    variance = model.norm.running_var
    assert variance is not None
    assert float(variance.min()) > 0
    assert len(variance.unique()) == 64
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight[3].any(), "the row of padding"


def test_weights_are_a_function_of_seed_and_name() -> None:
    first, again, other = drawn().state_dict(), drawn().state_dict(), drawn(seed=2).state_dict()
    for name, value in first.items():
        assert torch.equal(value, again[name])
        stays = name.startswith("frozen") or name == "norm.num_batches_tracked"
        assert torch.equal(value, other[name]) == stays, name
    torch.manual_seed(0)
    unchanged = Parts().frozen.weight
    assert torch.equal(unchanged, first["frozen.weight"])


def test_weights_do_not_depend_on_the_number_of_threads() -> None:
    """Ranks share the cores of a machine, and the reference has all of them."""
    threads, states = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            model = nn.Linear(1152, 1024)
            redraw_weights(model, 0)
            states.append(model.weight.detach().clone())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(state, states[0]) for state in states)


class ZeroBranch(nn.Module):
    """A residual branch that begins as zeros, so at first nothing before its last layer has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(72, 16), nn.Linear(16, 72)
        self.head = nn.Linear(72, 4)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(1)
        out: Tensor = self.head(x + self.last(self.inner(x).tanh()))
        return out


@pytest.fixture
def request_of_zero_branch() -> ProofRequest:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ZeroBranch()
    user_model = UserModel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), Points(), global_batch=8
    )
    return ProofRequest(user_model, Plan.model_validate({"axes": {"replicate": 2}}), steps=1)


def test_a_fault_that_the_usual_start_hides_is_found(
    two: RankPool, request_of_zero_branch: ProofRequest, tmp_path: Path
) -> None:
    fault = ScaledGradients(2.0, parameter="*inner.*")
    proofs = {
        start: two.run(prove_in_pool, replace(request_of_zero_branch, start=start, prepare_session=fault), tmp_path)[0]
        for start in ("job", "random")
    }
    assert proofs["job"]["equal"]
    first = proofs["random"]["first_difference"]
    assert (first["what"], first["parameter"], first["cause"]) == ("gradient", "inner.bias", "scaled")
    assert [proofs[start]["start"] for start in ("job", "random")] == ["job", "random"]
    assert any("weights that were drawn" in note for note in proofs["random"]["notes"])


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_a_right_plan_is_equal_from_random_weights(
    two: RankPool, request_of_zero_branch: ProofRequest, tmp_path: Path, axis: str
) -> None:
    plan = Plan.model_validate({"axes": {axis: 2}})
    request = replace(request_of_zero_branch, start="random", plan=plan, steps=3)
    proof = two.run(prove_in_pool, request, tmp_path)[0]
    assert proof["equal"], proof["first_difference"]


def test_the_users_model_keeps_its_weights(request_of_zero_branch: ProofRequest) -> None:
    subject = request_of_zero_branch.subject
    assert isinstance(subject, UserModel)
    setup = build_setup(replace(request_of_zero_branch, start="random"))
    assert setup.model.get_parameter("last.weight").abs().min() > 0
    assert not subject.model.get_parameter("last.weight").any()


def test_other_starts_are_refused(request_of_zero_branch: ProofRequest) -> None:
    with pytest.raises(InputError, match="cannot start from zeros: choose job or random"):
        check_request(replace(request_of_zero_branch, start="zeros"))
