"""`data.weights` and `data.sampler` of a job."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from meshwright.cluster.detect import find_cluster
from meshwright.data.sampling import WeightedSampling
from meshwright.errors import InputError, UserCodeError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.proof.request import ProofRequest
from meshwright.train.build import build_loading
from meshwright.train.check import check_job
from tests.proof.cases import prove_in_pool
from tests.ranks import RankFailure, RankPool
from tests.train.one_process import SIZE, TOY, equal_states, session_of, toy_job, train

PART = "tests.train.step.test_sampling:"
TORCH_SAMPLER = "torch.utils.data:WeightedRandomSampler"


def weights(size: int = SIZE, seed: int = 0) -> list[float]:
    """The sample with the number n has the weight n, so that the first one is never drawn."""
    return [float(index) for index in range(size)]


def unseeded() -> np.ndarray:
    return np.frombuffer(Path("/dev/urandom").open("rb").read(SIZE), np.uint8) + 1.0


def failing() -> None:
    raise KeyError("class 7")


def sampled_job(**data: Any) -> Job:
    return toy_job(data={**TOY["data"], **data})


def sampling_of(**data: Any) -> WeightedSampling:
    sampling = build_loading(sampled_job(**data), torch.device("cpu")).sampling
    assert sampling is not None
    return sampling


def test_weights_come_from_a_function_or_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.array(weights()))
    (tmp_path / "weights.txt").write_text("\n".join(map(str, weights())))
    for source in ({"call": f"{PART}weights"}, str(tmp_path / "weights.npy"), str(tmp_path / "weights.txt")):
        sampling = sampling_of(weights=source)
        assert sampling.weights.tolist() == weights()
        assert (sampling.draws, sampling.replacement) == (SIZE, True)
    assert sampling_of(weights={"call": f"{PART}weights"}, epoch_samples=70).draws == 70


def test_the_sampler_of_torch_is_understood() -> None:
    options = {"weights": {"call": f"{PART}weights"}, "num_samples": 20, "replacement": False}
    sampling = sampling_of(sampler={"call": TORCH_SAMPLER, **options})
    assert (sampling.weights.tolist(), sampling.draws, sampling.replacement) == (weights(), 20, False)


def test_epochs_have_as_many_samples_as_are_drawn(tmp_path: Path) -> None:
    trainer = train(sampled_job(weights={"call": f"{PART}weights"}, epoch_samples=72), tmp_path)
    assert trainer.session.steps == trainer.length.total_steps() == 2 * 8  # 2 epochs of 8 batches


def test_a_resumed_run_ends_like_one_that_was_not_interrupted(tmp_path: Path) -> None:
    job = sampled_job(weights={"call": f"{PART}weights"})
    whole = session_of(train(job, tmp_path / "whole")).state_dict()
    train(job, tmp_path / "resumed", stop_after=7)
    resumed = session_of(train(job, tmp_path / "resumed")).state_dict()
    assert equal_states(whole, resumed)
    assert not equal_states(whole, session_of(train(toy_job(), tmp_path / "unweighted")).state_dict())


def test_a_weighted_job_is_proved_on_two_ranks(tmp_path: Path, two: RankPool) -> None:
    job = sampled_job(weights={"call": f"{PART}weights"}, epoch_samples=25)
    plan = Plan.model_validate({"axes": {"replicate": 2}, "numerics": {"batch_norm": "synchronized"}})
    proof = two.run(prove_in_pool, ProofRequest(job, plan, steps=4), tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
    assert not any("schedule" in note for note in proof["notes"])


def train_unseeded(rank: int, size: int, folder: Path) -> None:
    train(sampled_job(weights={"call": f"{PART}unseeded"}), folder, rank=rank, size=size)


def test_weights_that_differ_between_ranks_are_refused(tmp_path: Path, two: RankPool) -> None:
    with pytest.raises(RankFailure, match="the weights of the samples are not the same on ranks 0 and 1"):
        two.run(train_unseeded, tmp_path)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(20), 0)] * SIZE)


class Ordered(Dataset[Any]):
    """No sampler at all."""

    def __init__(self) -> None:
        self.order = [0, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"weights": {"call": f"{PART}weights", "size": 3}}, "there are 3 weights for the 50 samples"),
        ({"weights": {"call": f"{PART}weights"}, "train": {"call": f"{PART}Stream"}}, "Stream, which is a stream"),
        (
            {"sampler": {"call": f"{PART}Ordered"}},
            "data.sampler: .*Ordered makes a Ordered, but only the",
        ),
        ({"weights": "nowhere.txt"}, "data.weights: .*nowhere.txt cannot be read as numbers"),
        ({"weights": {"call": f"{PART}sampled_job"}}, "data.weights: a Job is no list of weights"),
        ({"weights": 3}, r"data.weights is 3: write the path of a file, or \{call: package.module:name, ...\}"),
        ({"weights": {"kall": 3}}, r"data.weights .*: write the path of a file, or \{call: package.module:name, ...\}"),
        ({"epoch_samples": 3}, "data.epoch_samples is .* but data.weights is missing"),
        ({"weights": "a", "sampler": {"call": TORCH_SAMPLER}}, "data.weights and data.sampler both say"),
        ({"weights": "a", "partition": "sample"}, "data.partition is sample, which visits each sample once"),
    ],
)
def test_wrong_weights_are_refused_before_ranks_start(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        check_job(sampled_job(**data), Plan(), find_cluster("1xcpu"))
    assert "\n" not in str(refusal.value)


def test_an_error_in_the_function_names_its_line() -> None:
    with pytest.raises(UserCodeError, match=r"data.weights: .*failing failed: KeyError: 'class 7' \(.*sampling.py"):
        check_job(sampled_job(weights={"call": f"{PART}failing"}), Plan(), find_cluster("1xcpu"))
