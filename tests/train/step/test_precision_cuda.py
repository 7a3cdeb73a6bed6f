"""On a GPU: compiled blocks and recorded steps train as eager ones do, fp32 is fp32, and 8 bits follow."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import NextTokenLoss
from meshwright.workloads.text.decoder_sizes import decoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 12


def batches(sizes: tuple[int, ...] = (8,) * STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(0, 40, (max(sizes), 1), generator=generator)
    tokens = (start + torch.arange(33) * 3) % 96  # what follows can be learnt
    return [(tokens[:size, :-1], tokens[:size, 1:]) for size in sizes]


def net() -> nn.Module:
    torch.manual_seed(0)
    return decoder("gpt2", layers=2, hidden=64, heads=4, vocabulary=96, sequence=32, dropout=0.0)


def trained(plan: dict[str, dict[str, object]], sizes: tuple[int, ...] = (8,) * STEPS) -> tuple[list[float], Session]:
    session = Session(
        copy.deepcopy(net()),
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=3e-3),
        loss=NextTokenLoss(),
        plan=Plan.model_validate(plan),
        world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
        clip_norm=1.0,
    )
    return [float(session.step(batch)) for batch in batches(sizes)], session


def test_recorded_steps_are_those_of_eager_ones() -> None:
    sizes = (8,) * 8 + (5, 8, 8)  # a short batch between
    eager, ours = trained({}, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded, theirs = trained({"compute": {"cuda_graphs": True}}, sizes)
    assert theirs.graphs is not None
    assert len(theirs.graphs._captured) == 1, "the steps of eight samples were recorded"
    assert recorded == pytest.approx(eager, rel=1e-5)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compute", [{"compile": "blocks"}, {"compile": "blocks", "cuda_graphs": True}])
def test_compiled_blocks_train_as_eager_ones(compute: dict[str, object]) -> None:
    eager, _ = trained({})
    compiled, session = trained({"compute": compute})
    assert compiled == pytest.approx(eager, rel=1e-4)
    assert set(session.state_dict()) == set(net().state_dict())


def test_dropout_is_drawn_anew_in_every_repetition() -> None:
    session = Session(
        nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.0),
        loss=nn.MSELoss(),
        plan=Plan.model_validate({"compute": {"cuda_graphs": True}}),
        world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
    )
    batch = (torch.ones(16, 64), torch.zeros(16, 1))
    losses = [float(session.step(batch)) for _ in range(10)]
    assert len(set(losses)) == 10


def test_fp32_does_not_round_to_tf32() -> None:
    torch.manual_seed(0)
    image = torch.randn(4, 16, 16, 16)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 14 * 14, 8))
    with torch.no_grad():
        right = model.double()(image.double())
    model.float()
    errors = {}
    for precision in ("fp32", "tf32"):
        session = Session(
            copy.deepcopy(model),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.0),
            loss=nn.MSELoss(),
            plan=Plan.model_validate({"numerics": {"precision": precision}}),
            world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
        )
        outputs: list[Tensor] = []
        session.module.register_forward_hook(
            lambda _, __, out, outputs=outputs: outputs.append(out.detach().double().cpu())
        )
        session.step((image, torch.zeros(4, 8)))
        errors[precision] = float((outputs[0] - right).abs().max() / right.abs().max())
    assert errors["fp32"] < 1e-5 < errors["tf32"]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_the_loss_follows_that_of_fp32(precision: str) -> None:
    if precision == "fp8":
        pytest.importorskip("torchao")
    expected, _ = trained({})
    losses, _ = trained({"numerics": {"precision": precision}})
    assert expected[-1] < 0.9 * expected[0]
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 0.03 * expected[0]
