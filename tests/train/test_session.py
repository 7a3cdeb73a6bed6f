"""A session in a user's own loop: precision and memory format, evaluation over ranks, buffers, saving and resuming."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import meshwright
from meshwright.errors import CheckpointError, InputError
from meshwright.plan import Plan
from meshwright.train.metrics import accuracy
from meshwright.train.session import Parameters, Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import equal_states, world
from tests.train.toy import Net, points


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)  # before a norm, a bias has no true gradient
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 6 * 6, 4)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(image)).relu().flatten(1))
        return out


def pictures(size: int = 24) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 4, (size,), generator=generator))


def session_of(model: nn.Module, plan: Plan | None = None, loss: Any = F.cross_entropy, **options: Any) -> Session:
    def make_optimizer(parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters.values(), lr=0.01)

    return Session(
        model, make_optimizer, loss=loss, plan=plan or Plan(), world=options.pop("world", world()), **options
    )


def new_model(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def train_images(groups: dict[str, Any], loss: Any = F.cross_entropy) -> tuple[Session, list[float]]:
    session = session_of(new_model(Images), Plan.model_validate(groups), loss)
    losses = [float(session.step(batch)) for batch in session.batches(pictures(), epochs=5, global_batch=8)]
    return session, losses


# ---- precision and layout


def test_bf16_computes_in_bf16_but_keeps_losses_and_weights_in_fp32() -> None:
    loss_dtypes: list[torch.dtype] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        loss_dtypes.append(output.dtype)
        return F.cross_entropy(output, target)

    layer_dtypes: list[torch.dtype] = []
    model = new_model(Images)
    bf16 = Plan.model_validate({"numerics": {"precision": "bf16"}})
    session = session_of(model, bf16, loss, sample=default_collate([pictures()[0], pictures()[1]]))
    loss_dtypes.clear()  # those of the trial before training
    model.get_submodule("conv").register_forward_hook(lambda module, inputs, output: layer_dtypes.append(output.dtype))
    losses = [session.step(batch) for batch in session.batches(pictures(), epochs=5, global_batch=8)]
    session.evaluate(pictures())
    assert set(layer_dtypes) == {torch.bfloat16}
    assert set(loss_dtypes) == {torch.float32}
    assert {value.dtype for value in session.state_dict().values()} == {torch.float32, torch.int64}
    assert float(losses[-1]) < float(losses[0])


def test_bf16_trains_nearly_but_not_exactly_as_fp32() -> None:
    _, exact = train_images({})
    _, rounded = train_images({"numerics": {"precision": "bf16"}})
    assert rounded == pytest.approx(exact, abs=0.1)
    assert rounded != exact


def test_channels_last_is_the_same_within_rounding() -> None:
    plain, exact = train_images({})
    session, losses = train_images({"compute": {"layout": "channels_last"}})
    weight = session.module.get_parameter("conv.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert losses == pytest.approx(exact, rel=1e-3)
    for name, value in plain.state_dict().items():
        assert torch.allclose(session.state_dict()[name], value, atol=1e-3), name
    new_model(Images).load_state_dict(session.state_dict())


# ---- a user's own loop


def test_a_loop_with_another_loader_and_a_schedule_per_step() -> None:
    model = new_model()
    session = meshwright.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=F.cross_entropy,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        plan=Plan.model_validate({"memory": {"accumulation": 2}}),
        device="cpu",
    )
    loader = torch.utils.data.DataLoader(points(40), batch_size=16)
    rates = []
    for batch in loader:
        rates.append(session.optimizer.param_groups[0]["lr"])
        loss = session.step(batch)
        assert loss.dim() == 0
    assert rates == [1.0, 0.5, 0.25]
    assert session.steps == 3
    assert session.module is model


def test_weights_load_into_the_original_model() -> None:
    session = session_of(new_model())
    for batch in session.batches(points(40), epochs=1, global_batch=20):
        session.step(batch)
    original = Net()
    original.load_state_dict(session.state_dict())
    assert equal_states(original.state_dict(), session.state_dict())


def test_a_batch_smaller_than_its_microbatches_is_refused() -> None:
    session = session_of(new_model(), Plan.model_validate({"memory": {"accumulation": 4}}))
    with pytest.raises(
        InputError, match=r"train\.global_batch is 3, smaller than 1 data-parallel ranks × 4 microbatches"
    ):
        session.batches(points(40), global_batch=3)


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(InputError, match=r"the plan \(replicate 2 · fp32\) is for 2 ranks, but there are 1"):
        session_of(new_model(), Plan.model_validate({"axes": {"replicate": 2}}))


class Cached(nn.Module):
    """Keeps a table for the longest input so far, as models with positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.table = torch.ones(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.ones(len(x)) * 2
        out: Tensor = x * (self.table[: len(x), None] * self.scale)
        return out


def test_tensors_that_a_model_caches_in_an_evaluation_can_be_used_in_training() -> None:
    model = Cached()
    session = session_of(model, loss=lambda output, target: output.mean())
    data = TensorDataset(torch.randn(6, 5), torch.zeros(6))
    session.evaluate(data, batch=6)
    session.step((torch.randn(4, 5), torch.zeros(4)))
    assert model.training


def test_an_evaluation_does_not_change_training() -> None:
    def losses(evaluate: bool) -> list[float]:
        session = session_of(new_model(), seed=4)
        values = []
        for batch in session.batches(points(40), epochs=2, global_batch=10):
            values.append(float(session.step(batch)))
            if evaluate:
                session.evaluate(points(13), {"accuracy": accuracy})
        return values

    assert losses(True) == losses(False)


def test_epochs_of_batches_count_from_the_first_step_of_the_session(tmp_path: Path) -> None:
    session = session_of(new_model())
    steps = [len([session.step(batch) for batch in session.batches(points(24), epoch + 1, 12)]) for epoch in range(2)]
    assert steps == [2, 2]
    with pytest.raises(InputError, match=r"epochs is 1, but this session has already trained 2, .* \(now epochs=3\)"):
        session.batches(points(24), epochs=1, global_batch=12)
    session.save(tmp_path / "finished")
    again = session_of(Net())
    again.load(tmp_path / "finished")
    assert not list(again.batches(points(24), epochs=2, global_batch=12)), "a finished run that is loaded ends"


# ---- saving and resuming


def save_and_resume(folder: Path, rank: int = 0, size: int = 1, seed: int = 7) -> tuple[list[float], dict[str, Tensor]]:
    """Trains three steps, saves in the middle of an epoch, and resumes in another session; the model has dropout."""
    plan = Plan.model_validate({"axes": {"replicate": size}})
    first = session_of(new_model(), plan, world=world(rank, size), seed=7)
    batches = first.batches(points(60), epochs=3, global_batch=12)
    for _ in range(3):
        first.step(next(batches))
    first.save(folder / "third")
    torch.manual_seed(99)
    again = session_of(Net(), plan, world=world(rank, size), seed=seed)
    again.load(folder / "third")
    assert (again.steps, again.position) == (3, (0, 3))
    rest = again.batches(points(60), epochs=3, global_batch=12)
    losses = [float(again.step(next(rest))) for _ in range(4)]
    undisturbed = [float(first.step(next(batches))) for _ in range(4)]
    assert losses == undisturbed
    assert equal_states(again.state_dict(), first.state_dict())
    return losses, again.state_dict()


@pytest.mark.parametrize("seed", [7, 8])
def test_a_loaded_session_resumes_bitwise_even_with_another_seed(tmp_path: Path, seed: int) -> None:
    save_and_resume(tmp_path, seed=seed)


def test_loading_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: its manifest\.json cannot be read"):
        session_of(new_model()).load(tmp_path / "nowhere")


def test_a_checkpoint_can_be_saved_again_to_the_same_path(tmp_path: Path) -> None:
    session = session_of(new_model())
    session.save(tmp_path / "last")
    session.step((torch.randn(4, 20), torch.tensor([0, 1, 2, 3])))
    session.save(tmp_path / "last")
    again = session_of(Net())
    again.load(tmp_path / "last")
    assert again.steps == 1
    assert equal_states(again.state_dict(), session.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


# ---- ranks


def save_on_ranks(rank: int, size: int, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    return save_and_resume(folder, rank, size)


def test_ranks_resume_bitwise(three: RankPool, tmp_path: Path) -> None:
    results = three.run(save_on_ranks, tmp_path)
    assert all(losses == results[0][0] for losses, _ in results), "the loss is the global one on every rank"
    assert all(equal_states(state, results[0][1]) for _, state in results)


def evaluate_on_ranks(rank: int, size: int, samples: int, batch: int) -> tuple[dict[str, float] | None, int]:
    evaluated = 0

    def counting_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal evaluated
        evaluated += len(target)
        return accuracy(output, target)

    plan = Plan.model_validate({"axes": {"replicate": size}})
    session = session_of(new_model(), plan, world=world(rank, size))
    return session.evaluate(points(samples), {"accuracy": counting_accuracy}, batch=batch), evaluated


@pytest.mark.parametrize(("samples", "batch"), [(1, 6), (2, 6), (10, 6), (25, 2), (24, 6)])
def test_every_sample_is_evaluated_once_whatever_the_ranks(three: RankPool, samples: int, batch: int) -> None:
    expected, evaluated = evaluate_on_ranks(0, 1, samples, batch)
    assert evaluated == samples
    results = three.run(evaluate_on_ranks, samples, batch)
    assert sum(evaluated for _, evaluated in results) == samples
    for values, _ in results:
        assert values == pytest.approx(expected, rel=1e-6)
        assert values == results[0][0], "every rank has the same values"


def interrupt_on_rank_1(rank: int, size: int) -> tuple[dict[str, float] | None, bool]:
    plan = Plan.model_validate({"axes": {"replicate": size}})
    session = session_of(new_model(), plan, world=world(rank, size))
    return session.evaluate(points(30), batch=3, interrupted=lambda: rank == 1), session.module.training


def test_an_evaluation_that_one_rank_interrupts_is_interrupted_on_all(three: RankPool) -> None:
    assert three.run(interrupt_on_rank_1) == [(None, True)] * 3


def statistics(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """BatchNorm statistics right after a step, as evaluation sees them, as returned, and as saved."""
    plan = Plan.model_validate({"axes": {"replicate": size}})
    session = session_of(new_model(), plan, world=world(rank, size))
    batches = session.batches(points(60), epochs=1, global_batch=30)
    mean: Tensor = session.module.get_buffer("layers.4.running_mean")
    session.step(next(batches))
    after_step = mean.clone()
    session.evaluate(points(7))
    evaluated = mean.clone()
    session.step(next(batches))
    second = mean.clone()
    session.save(folder / "saved")
    loaded = session_of(Net(), plan, world=world(rank, size))
    loaded.load(folder / "saved")
    return {
        "after step": after_step,
        "evaluated": evaluated,
        "second": second,
        "returned": session.state_dict()["layers.4.running_mean"].clone(),
        "loaded": loaded.module.get_buffer("layers.4.running_mean").clone(),
    }


def test_rank_0s_batch_norm_statistics_are_used_on_all_ranks(three: RankPool, tmp_path: Path) -> None:
    results = three.run(statistics, tmp_path)
    assert not torch.equal(results[0]["after step"], results[1]["after step"]), "ranks see other samples"
    for result in results:
        assert torch.equal(result["evaluated"], results[0]["after step"])
        assert torch.equal(result["returned"], results[0]["second"])
        assert torch.equal(result["loaded"], results[0]["second"])


def learning_rates(rank: int, size: int) -> list[float]:
    plan = Plan.model_validate({"axes": {"replicate": size}})

    def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    session = session_of(new_model(), plan, world=world(rank, size), make_schedule=make_schedule)
    rates = []
    for batch in session.batches(points(36), epochs=1, global_batch=12):
        rates.append(session.optimizer.param_groups[0]["lr"])
        session.step(batch)
    return rates


def test_a_schedule_does_not_depend_on_the_number_of_ranks(three: RankPool) -> None:
    assert three.run(learning_rates) == [learning_rates(0, 1)] * 3


@pytest.mark.parametrize("compilation", all_but(["none"], ["none", "model"]))
def test_torch_is_as_it_was_after_an_import_and_when_a_session_is_freed(compilation: str) -> None:
    """What is named here has a row in docs/design.md."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.train.torch_state", compilation]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = ["compiler.ignore_logger_methods", "compiler.ignore_logging_functions", "filters of warnings"]
    assert json.loads(output.splitlines()[-1]) == {
        "imported": [],
        "trained": settings if compilation == "model" else [],
        "freed": [],
    }
