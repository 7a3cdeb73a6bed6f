"""What is written down of a run's first steps, and that looking on changes nothing."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.data.batch import Batch, Microbatch
from meshwright.launch.signals import StopRequest
from meshwright.train.output.recording import read, read_start, recorded_steps
from meshwright.train.output.witness import bits_of, digest, drew, samples_of, watch_bits
from tests.train.alone import equal_states, make_trainer, session_of, toy_job


def test_the_first_steps_are_written_down_and_no_more(tmp_path: Path) -> None:
    job = toy_job(train={"epochs": None, "steps": 4})
    trainer = make_trainer(job, tmp_path / "recorded")
    trainer.record = 2
    with StopRequest() as stop:
        assert trainer.run(stop)
    folder = trainer.folder.record
    assert recorded_steps(folder) == 2
    start, first, second = read_start(folder), read(folder, 1, keep=True), read(folder, 2, keep=True)
    assert set(first.gradients) == {name for name, _ in session_of(trainer).module.named_parameters()}
    assert set(start.state) == set(first.state) == set(session_of(trainer).state_dict())
    assert not torch.equal(first.state["layers.0.weight"], second.state["layers.0.weight"])
    (witness,) = first.seen
    assert witness.drew, "the model drops out"
    assert sum(map(len, witness.samples)) == sum(witness.counted) == job.train.global_batch
    assert set(witness.held) == set(first.gradients)
    assert witness.norm == pytest.approx(float(torch.cat([g.flatten() for g in first.gradients.values()]).norm()))

    plain = make_trainer(job, tmp_path / "plain")
    with StopRequest() as stop:
        assert plain.run(stop)
    assert not plain.folder.record.exists()
    assert equal_states(session_of(plain).state_dict(), session_of(trainer).state_dict())


def test_a_tensor_has_the_bits_of_the_shortest_type_that_holds_it() -> None:
    wide = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert bits_of(wide) == 53
    assert bits_of(wide.float().double()) == 24
    assert bits_of(wide.half().double()) == 11
    assert bits_of(wide.bfloat16().float()) == 8
    assert bits_of(torch.zeros(3)) == 0
    assert bits_of(torch.arange(3)) == 0


def test_a_layers_bits_are_those_of_its_output() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[0].register_forward_hook(lambda layer, arguments, output: output.bfloat16().double())
    bits: dict[str, int] = {}
    end = watch_bits(model, bits)
    model(torch.randn(3, 4, dtype=torch.float64))
    assert bits == {"0": 8, "1": 53}
    end()
    bits.clear()
    model(torch.randn(3, 4, dtype=torch.float64))
    assert bits == {}


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_it_is_known_who_drew(draw: object) -> None:
    assert callable(draw)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert not drew(torch.device("cpu"))
    draw()
    assert drew(torch.device("cpu"))


def test_a_sample_keeps_its_digest_in_every_microbatch() -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    whole = Batch((Microbatch((x, y), 4),), 4, 0, 0, False)
    halves = replace(whole, parts=(Microbatch((x[:2], y[:2]), 2), Microbatch((x[2:], y[2:]), 2)))
    (together,) = samples_of(whole)
    assert len(set(together)) == 4
    assert together == tuple(sample for part in samples_of(halves) for sample in part)
    other = replace(whole, parts=(Microbatch((x, y.flip(0)), 4),))
    assert not set(samples_of(other)[0]) & set(together), "a target belongs to its sample"


def test_a_digest_is_of_numbers_and_not_of_strides() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert digest(image) == digest(image.to(memory_format=torch.channels_last))
    assert digest(image) != digest(image.double())
    assert digest(image) != digest(image.flatten())
    assert digest(torch.zeros(1)) != digest(torch.full((1,), 1e-40))
