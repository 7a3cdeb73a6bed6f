"""Lower precisions under every axis: the loss follows that of fp32, and all ranks leave out a step that overflows."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshwright.errors import InputError, TrainingDiverged
from meshwright.parallel.check import check_cast
from meshwright.parallel.weights.layout import local_tensor
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.train.session import Session
from meshwright.train.step.loss_scale import INTERVAL, START, LossScale
from tests.proof.matrix import plan_of
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import world
from tests.zoo import BATCH, ZOO, RandomSamples

AXES = ("R2", "S2", "T2", "P2")
LOW = ("bf16", "fp16")
EPOCHS = 5
BAND = 0.03  # of the loss that fp32 begins with: three times what bf16's 8 bits are off in one product


def planned(kind: str, case: str, **groups: dict[str, Any]) -> Plan:
    raw = plan_of(kind, case).model_dump()
    for group, fields in groups.items():
        raw[group].update(fields)
    return Plan.model_validate(raw)


def session_of(kind: str, plan: Plan, rank: int, size: int) -> tuple[Session, RandomSamples]:
    torch.manual_seed(0)
    data = RandomSamples(ZOO[kind].data)
    session = Session(
        ZOO[kind].model(),
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=3e-3),
        loss=ZOO[kind].loss,
        plan=plan,
        world=world(rank, size),
        clip_norm=1.0,
        sample=default_collate([data[0]] * 2),
    )
    return session, data


def losses(rank: int, size: int, kind: str, plan: Plan) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """The loss of every step, and the types of what the model returned and of its parameters."""
    session, data = session_of(kind, plan, rank, size)
    returned: set[torch.dtype] = set()
    for module in session.module.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, __, out: returned.add(out.dtype) if is_plain(out) else None)
    values = [float(session.step(batch)) for batch in session.batches(data, EPOCHS, BATCH)]
    return values, returned, {parameter.dtype for parameter in session.module.parameters()}


@cache
def losses_in_fp32(pool: RankPool, kind: str, case: str) -> list[float]:
    """The losses that lower precisions are compared with. Several tests use the same ones."""
    values: list[float] = pool.run(losses, kind, planned(kind, case))[0][0]
    return values


def is_plain(value: Any) -> bool:
    return isinstance(value, Tensor)


def is_close_to(values: list[float], expected: list[float]) -> bool:
    assert expected[-1] < 0.9 * expected[0], "nothing is learnt that could be followed"
    return max(abs(a - b) for a, b in zip(values, expected, strict=True)) <= BAND * expected[0]


@pytest.mark.parametrize(
    ("case", "precision"),
    all_but([], [(case, low) for case in AXES for low in LOW]),
)
def test_the_loss_follows_that_of_fp32(two: RankPool, case: str, precision: str) -> None:
    expected = losses_in_fp32(two, "gpt", case)
    low = torch.bfloat16 if precision == "bf16" else torch.float16
    results = two.run(losses, "gpt", planned("gpt", case, numerics={"precision": precision}))
    for values, returned, weight_dtypes in results:
        assert is_close_to(values, expected)
        assert low in returned
        assert weight_dtypes == {torch.float32}
    assert results[0][0] != expected


@pytest.mark.parametrize(
    ("kind", "case", "precision"),
    all_but(
        {("two_tower", "S2", "bf16")},
        [(kind, case, low) for kind in ("gpt", "two_tower") for case in ("S2", "S2 gradients", "S2P2") for low in LOW],
    ),
)
def test_weights_are_gathered_in_low_precision_and_kept_in_fp32(
    two: RankPool, four: RankPool, kind: str, case: str, precision: str
) -> None:
    plan = planned(kind, case, numerics={"precision": precision, "cast": "weights"})
    pool = two if plan.world_size == 2 else four
    expected = losses_in_fp32(pool, kind, case)
    for values, _, weight_dtypes in pool.run(losses, kind, plan):
        assert is_close_to(values, expected)
        assert weight_dtypes == {torch.float32}


@pytest.mark.parametrize("case", all_but({"R2"}, ["R2", "S2", "R2T2"]))
def test_gradients_travel_rounded(two: RankPool, four: RankPool, case: str) -> None:
    pool = two if plan_of("gpt", case).world_size == 2 else four
    expected = losses_in_fp32(pool, "gpt", case)
    values, _, _ = pool.run(losses, "gpt", planned("gpt", case, gradients={"precision": "bf16"}))[0]
    assert is_close_to(values, expected)
    assert values[0] == pytest.approx(expected[0], abs=1e-6), "the forward pass is in fp32"
    assert values != expected


def test_batch_norm_does_not_take_rounded_weights() -> None:
    plan = planned("resnet", "S2", numerics={"precision": "bf16", "cast": "weights"})
    with pytest.raises(InputError, match="is a BatchNorm, whose running statistics stay in fp32"):
        check_cast(plan, ZOO["resnet"].model())


def train_with_overflow(rank: int, size: int, kind: str, case: str) -> list[tuple[float, int, dict[str, Tensor]]]:
    """After each of three steps: the loss scale, the number of skipped steps, and the weights. In the second step one
    gradient of the last rank overflows."""
    session, data = session_of(kind, planned(kind, case, numerics={"precision": "fp16"}), rank, size)
    run_forward_backward = session._run_forward_backward

    def overflow(*arguments: Any) -> Tensor:
        loss = run_forward_backward(*arguments)
        if rank == size - 1 and session.steps == 1:
            gradient = next(p.grad for p in session.module.parameters() if p.grad is not None)
            local_tensor(gradient).fill_(float("inf"))
        return loss

    patched: Any = session
    patched._run_forward_backward = overflow
    values = []
    for batch in session.batches(data, 1, BATCH):
        session.step(batch)
        assert session.loss_scale is not None
        weights = {name: value.clone() for name, value in session.state_dict().items()}
        values.append((session.loss_scale.value, session.loss_scale.skipped, weights))
    return values


@pytest.mark.parametrize("case", all_but({"R2", "T2"}, AXES))
def test_an_overflow_on_one_rank_makes_all_ranks_skip_the_step(two: RankPool, case: str) -> None:
    for first, second, third in two.run(train_with_overflow, "gpt", case):
        assert (first[:2], second[:2], third[:2]) == ((START, 0), (START / 2, 1), (START / 2, 1))
        assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])
        assert any(not torch.equal(second[2][name], third[2][name]) for name in first[2])


def test_the_factor_grows_after_many_good_steps_and_is_saved() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    scale = LossScale(torch.device("cpu"), 1)
    for _ in range(INTERVAL):
        weight.grad = torch.full((2,), scale.value)
        assert scale.unscale_([weight])
        assert weight.grad.tolist() == [1, 1]
    assert scale.value == 2 * START
    weight.grad = torch.tensor([1.0, float("nan")])
    assert not scale.unscale_([weight])
    loaded = LossScale(torch.device("cpu"), 1)
    loaded.load_state_dict(scale.state_dict())
    assert (loaded.value, loaded.skipped) == (START, 1)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"numerics": {"precision": "auto"}}, "auto, which only `meshwright train` resolves"),
        (
            {"numerics": {"precision": "bf16", "cast": "weights"}},
            "axes.shard is 1 and numerics.precision is bf16: change",
        ),
        ({"axes": {"shard": 2}, "numerics": {"cast": "weights"}}, "axes.shard is 2 and numerics.precision is fp32"),
        (
            {"axes": {"tensor": 2}, "numerics": {"precision": "fp8"}},
            "fp8, which works only with the replicate and shard",
        ),
        ({"axes": {"replicate": 2}, "compute": {"cuda_graphs": True}}, "or set compute.compile to blocks"),
    ],
)
def test_plans_whose_numerics_do_not_combine_are_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_rules(Plan.model_validate(plan))


def test_gradients_that_never_become_finite_end_the_run() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    scale = LossScale(torch.device("cpu"), 1)
    for _ in range(26):
        parameter.grad = torch.tensor([0.0, float("nan")])
        assert not scale.unscale_([parameter])
    parameter.grad = torch.tensor([0.0, float("nan")])
    with pytest.raises(TrainingDiverged, match="not finite even with a loss scale of"):
        scale.unscale_([parameter])
