"""`MeshwrightTrainer` gives the losses and the metrics of `Trainer`, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate: pip install accelerate")

from tests.compat.transformers.trainers import train
from tests.ranks import RankPool
from tests.soaked import all_but, some_in_core

CLOSE: dict[str, Any] = {"rel": 2e-5, "abs": 2e-5}
REPLICATE, SHARD, TENSOR = ({"axes": {axis: 2}} for axis in ("replicate", "shard", "tensor"))


@pytest.fixture(scope="module")
def of_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what transformers' Trainer computes on one process, by model and options."""
    results: dict[str, dict[str, Any]] = {}

    def result(name: str, samples: int = 22, **options: Any) -> dict[str, Any]:
        key = f"{name} {samples} {options}"
        if key not in results:
            results[key] = train(0, 1, name, "trainer", str(tmp_path_factory.mktemp("trainer")), samples, None, options)
        return results[key]

    return result


def assert_close(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("losses", "norms", "rates", "metrics"):
        assert result[name] == pytest.approx(expected[name], **CLOSE), name


@pytest.mark.parametrize("name", all_but({"llama", "adapters"}, ["llama", "gpt2", "classifier", "adapters"]))
def test_one_process_gives_the_numbers_of_trainer(name: str, of_trainer: Any, tmp_path: Path) -> None:
    result = train(0, 1, name, None, str(tmp_path))
    assert result == of_trainer(name)  # bit by bit, with dropout, too


@pytest.mark.parametrize("plan", some_in_core([SHARD, TENSOR, REPLICATE]), ids=["shard", "tensor", "replicate"])
def test_two_ranks_give_the_losses_of_one_process(plan: Any, two: RankPool, of_trainer: Any, tmp_path: Path) -> None:
    results = two.run(train, "llama", plan, str(tmp_path))
    assert results[0] == results[1]
    assert_close(results[0], of_trainer("llama"))


@pytest.mark.soak
def test_combined_axes_give_the_losses_of_one_process(four: RankPool, of_trainer: Any, tmp_path: Path) -> None:
    for first, second in (("replicate", "tensor"), ("shard", "tensor"), ("replicate", "shard")):
        results = four.run(train, "llama", {"axes": {first: 2, second: 2}}, str(tmp_path))
        assert all(result == results[0] for result in results)
        assert_close(results[0], of_trainer("llama"))


@pytest.mark.parametrize("plan", all_but([SHARD], [REPLICATE, SHARD]), ids=["replicate", "shard"])
def test_accumulated_batches_of_unequal_lengths_weigh_by_tokens(
    plan: Any, two: RankPool, of_trainer: Any, tmp_path: Path
) -> None:
    # The last batch of an epoch has three samples, and the last accumulation fewer batches.
    options = {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_steps": -1}
    results = two.run(train, "llama", plan, str(tmp_path), 19, None, options)
    assert_close(results[0], of_trainer("llama", 19, **options))


@pytest.mark.parametrize("name", all_but({"llama"}, ["llama", "llama of means", "classifier"]))
def test_a_rank_without_samples_has_no_weight(name: str, two: RankPool, of_trainer: Any, tmp_path: Path) -> None:
    options = {"max_steps": 5, "gradient_accumulation_steps": 2}
    results = two.run(train, name, REPLICATE, str(tmp_path), 5, None, options)  # batches of 4 and 1 samples
    assert_close(results[0], of_trainer(name, 5, **options))


def test_a_model_that_ignores_the_number_of_tokens(two: RankPool, of_trainer: Any, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2}
    results = two.run(train, "classifier", SHARD, str(tmp_path), 19, None, options)
    assert_close(results[0], of_trainer("classifier", 19, **options))


def test_adapters_on_two_ranks(two: RankPool, of_trainer: Any, tmp_path: Path) -> None:
    for plan in (REPLICATE, SHARD):
        assert_close(two.run(train, "adapters", plan, str(tmp_path))[0], of_trainer("adapters"))


@pytest.mark.parametrize(
    "options",
    [
        {"own_loss": True, "gradient_accumulation_steps": 2},
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.soak),
        {"train_sampling_strategy": "group_by_length"},
        pytest.param(
            {"dataloader_drop_last": True, "accelerator_config": {"use_seedable_sampler": False}},
            marks=pytest.mark.soak,
        ),
        {"is_stream": True, "max_steps": 7},
        pytest.param({"is_stream": True, "dataloader_drop_last": True}, marks=pytest.mark.soak),
    ],
    ids=lambda options: " ".join(options),
)
def test_arguments_mean_the_same_on_two_ranks(
    options: dict[str, Any], two: RankPool, of_trainer: Any, tmp_path: Path
) -> None:
    name = "classifier" if "own_loss" in options else "llama"
    results = two.run(train, name, REPLICATE, str(tmp_path), 23, None, options)
    assert_close(results[0], of_trainer(name, 23, **options))
