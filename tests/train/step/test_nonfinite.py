"""Finding NaN and infinite numbers: exactly, under every kind of plan, and without waiting for the newest step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.errors import TrainingDiverged
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.parallelize import parallelize
from meshwright.train.session import Session
from meshwright.train.step.divergence import DivergenceMonitor, LossReader
from meshwright.train.step.loss_scale import START
from meshwright.train.step.nonfinite import has_nonfinite, nonfinite_keys
from tests.parallel.test_sparse import WordClassifier
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import equal_states, world
from tests.train.runs.test_combining import EXACT, Points, model
from tests.train.step.test_precision import planned
from tests.zoo import BATCH, ZOO, RandomSamples

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)


# ---- tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_found_exactly(dtype: torch.dtype) -> None:
    largest = torch.full((3, 1000), torch.finfo(dtype).max, dtype=dtype)  # its norm overflows
    assert not has_nonfinite([torch.ones(2, dtype=dtype), largest, torch.empty(0, dtype=dtype)])
    for value in (NAN, INF, -INF):
        bad = largest.clone()
        bad[1, 7] = value
        assert has_nonfinite([torch.ones(2), bad])
    assert not has_nonfinite([])


def test_the_keys_of_a_checkpoint_are_named() -> None:
    state = {
        "model/good": torch.ones(2),
        "model/bad": torch.tensor([1.0, NAN]),
        "model/mask": torch.tensor([-INF]),
        "model/count": torch.tensor(3),
        "model/small": torch.ones(2).to(torch.float8_e4m3fn),
        "schedule": {"last": INF},
    }
    assert nonfinite_keys(state, ["model/mask"]) == ["model/bad"]
    assert nonfinite_keys(state) == ["model/bad", "model/mask"]


# ---- plans


def break_gradients(session: Session, step: int, factor: float = INF) -> None:
    """Multiplies the gradients of a step (counted from 0) by `factor` when the backward pass is done."""
    run_forward_backward = session._run_forward_backward

    def broken(*arguments: Any) -> Tensor:
        loss = run_forward_backward(*arguments)
        if session.steps == step:
            for parameter in session.module.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * factor
        return loss

    patched: Any = session
    patched._run_forward_backward = broken


def three_steps(session: Session, batches: Any) -> list[tuple[int, dict[str, Any]]]:
    """After each of three steps: the number of skipped ones, and the weights."""
    values = []
    for batch in batches:
        session.step(batch)
        weights = {name: value.clone() for name, value in session.state_dict().items()}
        values.append((session.skipped_steps, weights))
        if len(values) == 3:
            break
    return values


def train_zoo(rank: int, size: int, case: str) -> list[tuple[int, dict[str, Any]]]:
    """Trains under a plan; the gradients of the last rank alone are broken in the second step."""
    torch.manual_seed(0)
    data = RandomSamples(ZOO["gpt"].data)
    session = Session(
        ZOO["gpt"].model(),
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=3e-3),
        loss=ZOO["gpt"].loss,
        plan=planned("gpt", case),
        world=world(rank, size),
        clip_norm=1.0,
        on_nonfinite="skip",
        sample=default_collate([data[0]] * 2),
    )
    if rank == size - 1:
        break_gradients(session, 1)
    return three_steps(session, session.batches(data, None, BATCH))


def check_second_of_three_is_skipped(results: list[list[tuple[int, dict[str, Any]]]]) -> None:
    for (before, first), (skipped, second), (after, third) in results:
        assert (before, skipped, after) == (0, 1, 1)
        assert equal_states(second, first)
        assert not equal_states(third, second)
        assert not has_nonfinite(third.values())


CASES = ("R2", "S2", "T2", "P2", "R2 twice", "S2 optimizer", "S2 gradients")


@pytest.mark.parametrize("case", all_but({"S2"}, CASES))
def test_all_ranks_leave_out_an_update_that_one_of_them_could_not_use(two: RankPool, case: str) -> None:
    check_second_of_three_is_skipped(two.run(train_zoo, case))


METHODS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in EXACT},
    "rounded": {"precision": "bf16"},
    "PowerSGD": {"powersgd_rank": 1},
    "local steps": {"local_steps": 2},
}
QUICK_METHODS = {"ring", "shared_memory", "PowerSGD", "local steps"}


def train_with_nan(rank: int, size: int, gradients: dict[str, Any]) -> list[float]:
    """Losses of seven steps; in the fourth, a sample of the last rank is NaN."""
    session = Session(
        model(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        plan=Plan.model_validate({"axes": {"replicate": size}, "gradients": {"bucket_bytes": 9000, **gradients}}),
        world=world(rank, size),
        on_nonfinite="skip",
    )
    data, losses = Points(), []
    share = slice(rank * 12, rank * 12 + 12)
    for step in range(7):
        x = data.x[share].clone()
        x[0, 0] = NAN if step == 3 and rank == size - 1 else x[0, 0]
        losses.append(float(session.step((x, data.y[share]))))
        assert session.nonfinite == ("the loss is nan" if step == 3 else None)
    assert session.skipped_steps == 1
    assert not has_nonfinite(session.state_dict().values())
    return losses


@pytest.mark.parametrize("method", all_but(QUICK_METHODS, METHODS))
def test_training_goes_on_with_every_way_of_combining_gradients(two: RankPool, method: str) -> None:
    if method == "PowerSGD" and torch.cuda.is_available():
        pytest.skip("PowerSGD refuses CPU ranks where there is a GPU")
    for losses in two.run(train_with_nan, METHODS[method]):
        assert losses[4] < losses[2], "the steps before the fourth were not lost"
        assert losses[6] < losses[4], "the steps after it train on"


def train_sparse(rank: int, size: int) -> list[tuple[int, dict[str, Any]]]:
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(4)
    batch = (torch.randint(6, (8, 5), generator=generator), torch.randint(3, (8,), generator=generator))
    session = Session(
        WordClassifier(sparse=True),
        lambda parameters: torch.optim.Adagrad(parameters.values(), lr=0.5),
        loss=nn.functional.cross_entropy,
        plan=Plan.model_validate({"axes": {"replicate": size}}),
        world=world(rank, size),
        on_nonfinite="skip",
    )
    if rank == size - 1:
        break_gradients(session, 1)
    return three_steps(session, [batch] * 3)


def test_sparse_gradients_are_looked_at(two: RankPool) -> None:
    check_second_of_three_is_skipped(two.run(train_sparse))


# ---- fp16


def test_in_fp16_only_the_loss_counts() -> None:
    """Infinite gradients halve the loss scale, as always, and are not counted. A NaN loss is counted, and leaves the
    scale as it is."""
    torch.manual_seed(0)
    session = Session(
        nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
        loss=nn.functional.cross_entropy,
        plan=Plan.model_validate({"numerics": {"precision": "fp16"}}),
        world=world(),
        on_nonfinite="skip",
    )
    assert session.loss_scale is not None
    break_gradients(session, 0)
    x, y = torch.randn(8, 20), torch.arange(8) % 5
    session.step((x, y))
    assert (session.nonfinite, session.skipped_steps, session.loss_scale.value) == (None, 0, START / 2)
    before = {name: value.clone() for name, value in session.state_dict().items()}
    session.step((x * NAN, y))
    assert (session.nonfinite, session.skipped_steps, session.loss_scale.value) == ("the loss is nan", 1, START / 2)
    assert equal_states(session.state_dict(), before)
    session.step((x, y))
    assert (session.nonfinite, session.skipped_steps) == (None, 1)
    assert nonfinite_keys(session.state_dict()) == []


# ---- the user's own loop


@pytest.mark.parametrize("on_nonfinite", ["ignore", "skip"])
def test_a_users_own_loop_can_skip(on_nonfinite: Any) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = parallelize(net, optimizer, loss=nn.functional.cross_entropy, device="cpu", on_nonfinite=on_nonfinite)
    loss = session.step((torch.full((3, 4), NAN), torch.zeros(3, dtype=torch.int64)))
    assert bool(loss.isnan())
    skips = on_nonfinite == "skip"
    assert (session.skipped_steps, session.about()["skipped"], session.steps) == (skips, skips, 1)
    assert has_nonfinite(session.state_dict().values()) is not skips


# ---- reading losses


def test_the_monitor_counts_steps_in_a_row() -> None:
    monitor = DivergenceMonitor("stop")
    for step, loss in enumerate((1.0, NAN, NAN, 1.0, INF, NAN), 1):
        line = monitor.after_step(step, torch.tensor(loss), None, 0)
        expected = "step 2: the loss is nan: the run ends after 3 such steps in a row" if step == 2 else None
        assert line == expected, "told once"
    with pytest.raises(TrainingDiverged, match=r"the loss is -inf since step 5, for 3 steps in a row"):
        monitor.after_step(7, torch.tensor(-INF), None, 0)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_on_a_gpu_losses_are_read_two_steps_later() -> None:
    reader, device = LossReader(), torch.device("cuda")
    read = [reader.read(step, torch.tensor(float(step), device=device)) for step in range(1, 5)]
    assert read == [[], [], [(1, 1.0)], [(2, 2.0)]]
    assert reader.read_remaining() == [(3, 3.0), (4, 4.0)]


@needs_gpu
@pytest.mark.parametrize("compute", [{}, {"cuda_graphs": True}])
def test_on_a_gpu_a_skipped_step_changes_nothing(compute: dict[str, Any]) -> None:
    torch.manual_seed(0)
    session = Session(
        nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=0.1),
        loss=nn.functional.cross_entropy,
        plan=Plan.model_validate({"compute": compute}),
        world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
        on_nonfinite="skip",
    )
    x, y = torch.randn(8, 20), torch.arange(8) % 5
    factors: list[float] = [1, 1, 1, 1, 1, NAN, 1, INF, 1]
    for factor in factors:
        before = {name: value.clone() for name, value in session.state_dict().items()}
        session.step((x * factor, y))
        assert equal_states(session.state_dict(), before) == (factor != 1)
    assert session.skipped_steps == 2
    assert (session.graphs is not None and len(session.graphs._captured) == 1) == bool(compute)
