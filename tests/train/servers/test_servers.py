"""Synchronous parameter servers train exactly as one process does, and plans that they cannot run are refused. The
servers and workers here are threads of one process, which speak to each other as processes do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.plan_rules.table import check_rules
from meshwright.proof.prove import check_request
from meshwright.proof.request import ProofRequest
from meshwright.train.session import Session
from tests.soaked import all_but
from tests.train.runs.test_equal_to_one_process import BATCH, CASES, Points, assert_equal, bare_loop
from tests.train.servers.in_threads import ONE_RANK, Case, TrainingResult, train_in_threads
from tests.train.servers.server_cases import STEPS, Fp32Points, server_case, server_plan, tied_spec

pytestmark = pytest.mark.usefixtures("loopback")


def train_and_compare(case: Case, name: str) -> TrainingResult:
    """Trains with servers, and asserts that weights and losses equal those of one process."""
    trained = train_in_threads(case)
    expected = bare_loop(CASES[name])
    for weights in trained.weights.values():
        assert_equal((weights, trained.losses), expected)
    return trained


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", [name for name in CASES if name != "unused parameters"])
def test_synchronous_servers_train_as_one_process_does(name: str, servers: int) -> None:
    plan = server_plan(2, servers, memory={"accumulation": CASES[name][3]})
    trained = train_and_compare(server_case(name, plan, clip_norm=0.5), name)
    assert trained.coordinator.staleness.largest == 0
    assert trained.coordinator.version == STEPS


@pytest.mark.parametrize(("workers", "servers"), all_but([(3, 2)], [(1, 1), (3, 2), (4, 3), (2, 5)]))
def test_any_number_of_workers_and_servers_trains_the_same(workers: int, servers: int) -> None:
    """The last batch of an epoch has one sample: all workers but one get none."""
    train_and_compare(server_case("ignored targets", server_plan(workers, servers), clip_norm=0.5), "ignored targets")


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_workers_with_unequal_shares_train_the_same(servers: int) -> None:
    """The last batch of an epoch has one sample."""
    plan = server_plan(3, servers, shares=[5, 2, 1])
    train_and_compare(server_case("ignored targets", plan, clip_norm=0.5), "ignored targets")


def test_parameters_that_no_worker_used_have_no_gradient() -> None:
    """With a gradient of zero AdamW would decay them."""

    class PartlyUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 4), nn.Linear(3, 3)

        def forward(self, image: Tensor) -> Tensor:
            out: Tensor = self.used(image.flatten(1))
            return out

    def make_model_and_optimizer() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return PartlyUsed().double(), lambda parameters: torch.optim.AdamW(
            parameters.values(), lr=0.01, weight_decay=0.1
        )

    case = Case(make_model_and_optimizer, Points("tuple"), nn.functional.cross_entropy, BATCH, server_plan(2, 2), 3)
    weights = train_in_threads(case).weights[1]
    start = make_model_and_optimizer()[0].state_dict()
    assert torch.equal(weights["idle.weight"], start["idle.weight"])
    assert not torch.equal(weights["used.weight"], start["used.weight"])


def test_the_schedule_counts_steps_of_the_run() -> None:
    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)

    expected = [0.01 * 0.5 ** ((step + 1) // 4) for step in range(8)]
    for updates in ("synchronous", "asynchronous"):
        plan = server_plan(2, 2, gradients={"updates": updates})
        assert train_in_threads(server_case("plain", plan, steps=8, schedule=halving)).rates == pytest.approx(expected)


@pytest.mark.parametrize("updates", ["synchronous", "asynchronous"])
def test_updates_with_gradients_that_overflow_fp16_are_skipped(updates: str) -> None:
    """A loss of thousands times the loss scale overflows fp16: until the scale is small enough, no update is made."""

    def make_model_and_optimizer() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        return model, lambda parameters: torch.optim.SGD(list(parameters.values()), lr=1e-4)

    def large(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) * 1000

    plan = server_plan(2, 1, gradients={"updates": updates}, numerics={"precision": "fp16"})
    trained = train_in_threads(Case(make_model_and_optimizer, Fp32Points(), large, BATCH, plan, 30))
    coordinator = trained.coordinator
    pushes = 30 if updates == "synchronous" else 60
    assert 0 < coordinator.version < pushes
    assert coordinator.participants.loss_scale[0] < 2**16
    assert all(bool(value.isfinite().all()) for value in trained.weights[0].values())


def test_plan_fields_that_servers_cannot_combine_with_are_refused() -> None:
    check_rules(server_plan(2, 1))
    with pytest.raises(InputError, match="batch_norm is synchronized"):
        check_rules(server_plan(2, 1, numerics={"batch_norm": "synchronized"}))
    with pytest.raises(InputError, match="cuda_graphs"):
        check_rules(server_plan(1, 1, compute={"cuda_graphs": True}))
    request = ProofRequest(subject=None, plan=server_plan(2, 1, gradients={"updates": "asynchronous"}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="prove takes synchronous ones"):
        check_request(request)


def test_a_session_refuses_a_plan_with_servers() -> None:
    spec = tied_spec()
    with pytest.raises(InputError, match="`meshwright train` starts"):
        Session(spec.model, spec.make_optimizer, loss=None, plan=server_plan(1, 1), world=ONE_RANK)
