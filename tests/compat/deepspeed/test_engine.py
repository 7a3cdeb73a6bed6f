"""The engine trains as plain PyTorch on one process, with every stage of ZeRO, and saves and loads as DeepSpeed's."""

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright.compat.deepspeed as deepspeed
from meshwright.errors import CheckpointError, InputError
from tests.compat.deepspeed import loops
from tests.ranks import RankPool
from tests.soaked import all_but, some_in_core


@pytest.fixture(autouse=True, scope="module")
def _without_process_group_afterwards() -> Iterator[None]:
    """An engine makes a process group of one process, which other tests must not find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An engine, and a folder with its checkpoint `good`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    engine = _engine()[0]
    engine.save_checkpoint(folder, "good", client_state={"epoch": 4})
    return engine, folder


@pytest.mark.parametrize("stage", some_in_core(all_but({0, 1, 3}, [3, 2, 1, 0])))
def test_two_ranks_train_as_one_process(two: RankPool, stage: int) -> None:
    """With accumulation, clipping, weight decay and a schedule, and ranks whose models begin with other weights."""
    weights, norms = loops.train_alone()
    for result in two.run(loops.train_with_stage, stage):
        assert_close(result[0], weights)
        assert result[1] == pytest.approx(norms, abs=1e-9)


def test_two_ranks_with_split_layers_train_as_one_process(two: RankPool, tmp_path: Path) -> None:
    """Also after a checkpoint was loaded."""
    weights, norms = loops.train_alone()
    for result in two.run(loops.train_with_split_layers, tmp_path):
        assert_close(result[0], weights)
        assert result[1] == pytest.approx(norms, abs=1e-9)
        assert result[2] < sum(weight.numel() for weight in weights.values()), "each rank holds a part of the weights"


@pytest.mark.parametrize(("saved", "loaded"), [(0, 3), (3, 1)])
def test_a_checkpoint_continues_under_another_stage(two: RankPool, tmp_path: Path, saved: int, loaded: int) -> None:
    weights, _ = loops.train_alone()
    for result in two.run(loops.resume, tmp_path, saved, loaded):
        assert_close(result, weights)
    assert_close(torch.load(tmp_path / "model" / "pytorch_model.bin"), weights)


@pytest.mark.parametrize(
    ("latest", "tag", "message"),
    [
        (b"gone", None, "gone: there is no such checkpoint: give one of the tags good"),
        (b"good", "other", "other: there is no such checkpoint: give one of the tags good"),
        (b"", None, "latest contains '', which is no name of a checkpoint"),
        (b"../good", None, "latest contains '../good', which is no name of a checkpoint"),
        (b"\xff\xfe", None, "latest cannot be read"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(
    checkpoint: tuple[Any, Path], latest: bytes, tag: str | None, message: str
) -> None:
    engine, folder = checkpoint
    (folder / "latest").write_bytes(latest)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        engine.load_checkpoint(folder, tag)


def test_a_folder_without_latest_loads_nothing_and_says_so(checkpoint: tuple[Any, Path]) -> None:
    engine, folder = checkpoint
    (folder / "latest").unlink(missing_ok=True)
    with pytest.warns(UserWarning, match="latest does not exist, so nothing was loaded"):
        assert engine.load_checkpoint(folder) == (None, None)
    assert engine.load_checkpoint(folder, "good") == (str(folder / "good"), {"epoch": 4})


def test_a_damaged_checkpoint_is_refused(checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    engine, folder = checkpoint
    shutil.copytree(folder / "good", tmp_path / "good")
    file = tmp_path / "good" / "rank-00000.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin has \d+ bytes, its manifest says"):
        engine.load_checkpoint(tmp_path, "good")


def test_accumulation_by_hand_gives_the_same_weights(two: RankPool) -> None:
    weights, _ = loops.train_alone()
    for result in two.run(loops.no_sync_and_boundaries):
        assert_close(result, weights)


def test_optimizer_and_schedule_of_the_script_are_used(two: RankPool) -> None:
    weights, _ = loops.train_alone()
    for result in two.run(loops.client_objects):
        assert_close(result, weights)


def test_gathered_parameters_are_whole_and_changes_reach_all_ranks(two: RankPool) -> None:
    expected = loops.network()[0].weight  # type: ignore[index]
    for before, after in two.run(loops.gathered):
        torch.testing.assert_close(before, expected.detach())
        assert after.flatten().tolist() == pytest.approx([2.0] * after.numel(), abs=0.05)


def test_a_pipeline_of_two_stages_trains_as_one_process(two: RankPool) -> None:
    alone = loops.train_alone()[0]
    results = two.run(loops.pipeline, 2)
    for weights, losses, evaluated in results:
        assert_close(weights, alone)
        assert losses == results[0][1]
        assert evaluated == pytest.approx(results[0][2], abs=1e-12)
    with torch.no_grad():
        model = loops.network()
        model.load_state_dict(alone)
        pairs = loops.batches(loops.ACCUMULATION)
        expected = sum(float(nn.functional.cross_entropy(model(inputs), target)) for inputs, target in pairs)
    assert results[0][2] == pytest.approx(expected / loops.ACCUMULATION, abs=1e-9)


def _engine(config: dict[str, Any] | None = None, **keywords: Any) -> Any:
    base = {key: value for key, value in loops.CONFIG.items() if key != "train_batch_size"}
    sizes = {"train_micro_batch_size_per_gpu": loops.MICRO}
    return deepspeed.initialize(model=loops.network(), config={**base, **sizes, **(config or {})}, **keywords)


def test_the_loader_has_each_sample_once_in_deepspeeds_order() -> None:
    data = loops.Pairs()
    _, _, loader, _ = _engine(training_data=data)
    expected: Any = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    first = [sample for batch, _ in loader for sample in batch]
    assert len(loader) == len(data) // loops.MICRO
    for sample, index in zip(first, expected, strict=True):
        torch.testing.assert_close(sample, data[index][0])


def test_values_of_the_configuration_can_be_asked_for() -> None:
    engine = _engine({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})[0]
    assert engine.get_batch_info() == (8, 4, 2)
    assert (engine.zero_optimization_stage(), engine.bfloat16_enabled(), engine.fp16_enabled()) == (2, True, False)
    assert (engine.gradient_clipping(), engine.optimizer_name(), engine.scheduler_name()) == (0.3, "adamw", "WarmupLR")
    assert engine.get_lr() == [0.0]
    engine.eval()
    assert not engine.module.training
    engine.set_train_batch_size(16)
    assert engine.gradient_accumulation_steps() == 4


def test_steps_with_gradients_that_are_not_finite_are_left_out_in_bf16() -> None:
    engine = _engine({"bf16": {"enabled": True}, "gradient_accumulation_steps": 1})[0]
    before = loops.whole(engine)
    inputs, target = loops.batches(1, 4)[0]
    loss = nn.functional.cross_entropy(engine(inputs), target) * float("inf")
    engine.backward(loss)
    engine.step()
    assert (engine.was_step_applied(), engine.skipped_steps, engine.global_steps) == (False, 1, 1)
    assert_close(loops.whole(engine), before)


def test_gradients_are_added_up_if_the_configuration_says_so(two: RankPool) -> None:
    for mean, total in two.run(loops.mean_and_sum):
        assert total == pytest.approx(2 * mean, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: deepspeed.initialize(config=loops.CONFIG), "initialize(model=…) needs an nn.Module"),
        (lambda: deepspeed.initialize(model=loops.network()), "initialize needs a configuration"),
        (lambda: _engine(mpu=object()), "initialize(mpu=…) is not offered"),
        (lambda: _engine({"gradient_allreduce_op": "max"}), "gradient_allreduce_op is 'max': write mean or sum"),
        (
            lambda: _engine({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "nonsense": 2}}}),
            "optimizer AdamW refuses its params (lr 0.1, ",
        ),
        (lambda: _engine({"train_batch_size": 9}), "9 is not 4 × 2 × 1: write train_batch_size: 8"),
        (lambda: _engine()[0].step() or _engine()[0].step(), ""),
        (lambda: _engine({"gradient_accumulation_steps": 1})[0].step(), "call engine.backward(loss) in place of"),
        (lambda: _engine()[0].backward(torch.ones(2)), "engine.backward takes a loss"),
        (
            lambda: _engine({"zero_optimization": {"stage": 2}})[0].no_sync().__enter__(),
            "does not work with ZeRO stage 2",
        ),
    ],
)
def test_wrong_calls_say_what_to_do(call: Any, message: str) -> None:
    if not message:
        call()  # micro steps before the last one make no optimizer step
        return
    with pytest.raises(InputError, match=re.escape(message)):
        call()


def test_an_engine_without_an_optimizer_only_computes() -> None:
    engine, optimizer, loader, schedule = deepspeed.initialize(model=loops.network(), config={"train_batch_size": 4})
    assert (optimizer, loader, schedule) == (None, None, None)
    inputs, target = loops.batches(1, 4)[0]
    with pytest.raises(AssertionError, match=r"engine\.backward needs an optimizer"):
        engine.backward(nn.functional.cross_entropy(engine(inputs), target))


def test_keys_without_effect_are_listed_in_one_warning() -> None:
    with pytest.warns(UserWarning, match="these keys have no effect: zero_optimization.overlap_comm") as caught:
        _engine({"zero_optimization": {"stage": 1, "overlap_comm": True}})
    assert len([warning for warning in caught if "meshwright" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _engine()


def test_a_pipeline_module_makes_layers_once_and_ties_them() -> None:
    from meshwright.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec, balanced_bounds

    layers = [
        TiedLayerSpec("shared", nn.Linear, 4, 4, bias=False),
        torch.relu,
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("shared", nn.Linear, 4, 4, forward_fn=lambda layer, inputs: inputs @ layer.weight),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    assert sum(parameter.numel() for parameter in model.parameters()) == 16 + 20
    shared: Any = model.tied_modules["shared"]
    inputs, weight = torch.randn(3, 4), shared.weight
    middle = model.get_submodule("2")
    torch.testing.assert_close(model(inputs), middle(torch.relu(inputs @ weight.T)) @ weight)
    assert balanced_bounds([5, 1, 1, 5], 2) == [2]
    assert balanced_bounds([1, 1, 1, 9, 1], 3) == [3, 4]
    with pytest.raises(InputError, match="4 layers cannot be divided into 9 stages"):
        PipelineModule(layers, num_stages=9).cuts()
