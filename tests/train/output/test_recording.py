"""What a recording of a run's first steps contains, and that recording does not change the run."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.data.batch import Batch, Microbatch
from meshwright.errors import StorageError
from meshwright.processes.signals import StopRequest
from meshwright.train.output.observation import (
    digest,
    digest_samples,
    drew_random_numbers,
    mantissa_bits,
    record_output_bits,
)
from meshwright.train.output.record_file import Tensors
from meshwright.train.output.recording import (
    StepRecorder,
    _gather_on_first_rank,
    count_recorded_steps,
    read_start,
    read_step,
)
from tests.ranks import RankPool
from tests.train.one_process import equal_states, make_trainer, session_of, toy_job


def test_only_the_first_steps_are_recorded(tmp_path: Path) -> None:
    job = toy_job(train={"epochs": None, "steps": 4})
    trainer = make_trainer(job, tmp_path / "recorded")
    trainer.recorded_steps = 2
    with StopRequest() as stop:
        assert trainer.run(stop)
    folder = trainer.folder.record
    assert count_recorded_steps(folder) == 2
    start, first, second = read_start(folder), read_step(folder, 1, keep=True), read_step(folder, 2, keep=True)
    assert set(first.gradients) == {name for name, _ in session_of(trainer).module.named_parameters()}
    assert set(start.state) == set(first.state) == set(session_of(trainer).state_dict())
    assert not torch.equal(first.state["layers.0.weight"], second.state["layers.0.weight"])
    (observation,) = first.observations
    assert observation.drew_random_numbers, "the model has dropout"
    assert sum(map(len, observation.sample_digests)) == sum(observation.counted_samples) == job.train.global_batch
    assert set(observation.optimizer_parameters) == set(first.gradients)
    assert observation.gradient_norm == pytest.approx(
        float(torch.cat([g.flatten() for g in first.gradients.values()]).norm())
    )

    plain = make_trainer(job, tmp_path / "plain")
    with StopRequest() as stop:
        assert plain.run(stop)
    assert not plain.folder.record.exists()
    assert equal_states(session_of(plain).state_dict(), session_of(trainer).state_dict())


def test_a_tensor_has_the_bits_of_the_shortest_dtype_that_represents_it() -> None:
    wide = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert mantissa_bits(wide) == 53
    assert mantissa_bits(wide.float().double()) == 24
    assert mantissa_bits(wide.half().double()) == 11
    assert mantissa_bits(wide.bfloat16().float()) == 8
    assert mantissa_bits(torch.zeros(3)) == 0
    assert mantissa_bits(torch.arange(3)) == 0


def test_the_bits_of_each_layers_output_are_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[0].register_forward_hook(lambda layer, arguments, output: output.bfloat16().double())
    bits: dict[str, int] = {}
    remove_hooks = record_output_bits(model, bits)
    model(torch.randn(3, 4, dtype=torch.float64))
    assert bits == {"0": 8, "1": 53}
    remove_hooks()
    bits.clear()
    model(torch.randn(3, 4, dtype=torch.float64))
    assert bits == {}


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_drawing_random_numbers_is_detected(draw: object) -> None:
    assert callable(draw)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert not drew_random_numbers(torch.device("cpu"))
    draw()
    assert drew_random_numbers(torch.device("cpu"))


def test_the_digest_of_a_sample_does_not_depend_on_its_microbatch() -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    whole = Batch((Microbatch((x, y), 4),), 4, 0, 0, False)
    halves = replace(whole, microbatches=(Microbatch((x[:2], y[:2]), 2), Microbatch((x[2:], y[2:]), 2)))
    (together,) = digest_samples(whole)
    assert len(set(together)) == 4
    assert together == tuple(sample for part in digest_samples(halves) for sample in part)
    other = replace(whole, microbatches=(Microbatch((x, y.flip(0)), 4),))
    assert not set(digest_samples(other)[0]) & set(together), "a target belongs to its sample"


def test_a_digest_depends_on_values_and_not_on_strides() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert digest(image) == digest(image.to(memory_format=torch.channels_last))
    assert digest(image) != digest(image.double())
    assert digest(image) != digest(image.flatten())
    assert digest(torch.zeros(1)) != digest(torch.full((1,), 1e-40))
    assert digest(image[0, 0, 0, :1]) == digest(image.transpose(0, 3)[:1, 0, 0, 0]) == digest(image[:1, 0, 0, 0])


def differing_tensors(rank: int) -> tuple[Tensors, Tensors]:
    """Rank 1 differs in many tensors, rank 2 in none."""
    if rank == 2:
        return {}, {}
    turned = torch.arange(6.0).reshape(2, 3).t()
    gradients = {"turned": turned, "half": torch.tensor(rank, dtype=torch.bfloat16), "empty": torch.empty(0, 3)}
    return gradients, {"flags": torch.tensor([True, False]), "one": turned[:1, 1], "pair": torch.tensor([1 + 2j])}


def gather_differing(rank: int, world_size: int) -> dict[int, tuple[Tensors, Tensors]]:
    return _gather_on_first_rank(differing_tensors(rank), rank)


def test_tensors_that_differ_reach_rank_0_as_they_are(three: RankPool) -> None:
    first, *others = three.run(gather_differing)
    assert others == [{}, {}]
    assert first.keys() == {1, 2}
    assert first[2] == ({}, {})
    for received, sent in zip(first[1], differing_tensors(1), strict=True):
        assert received.keys() == sent.keys()
        for name, value in sent.items():
            assert received[name].dtype == value.dtype
            assert torch.equal(received[name], value)


@pytest.mark.usefixtures("used_up_quota")
def test_a_disk_that_cannot_take_a_recording_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    trainer = make_trainer(toy_job(), tmp_path)
    recorder = StepRecorder(session_of(trainer), tmp_path / "record")
    with pytest.raises(StorageError, match=r"step-0000\.pt: the quota of user \S+ on .* is used up: .* are needed"):
        recorder.write_start()
    recorder.close()
    assert list((tmp_path / "record").iterdir()) == []
