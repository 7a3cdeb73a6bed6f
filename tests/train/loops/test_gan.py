"""A GAN and a teacher with a student, each with two sessions in one process, train as plain PyTorch does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from tests.ranks import run_ranks
from tests.soaked import all_but
from tests.train.loops.models import AXES, assert_close, model, pairs, plan_of, shuffled

Result = tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]


def plain_gan() -> Result:
    generator, discriminator = model(5, 4), model(4, 1, seed=1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.02)
    optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9)
    losses = []
    loader = shuffled(pairs())
    for _ in range(2):
        for noise, real in loader:
            fake = generator(noise)
            loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()
            loss_g = F.softplus(-discriminator(fake)).mean()
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            losses.append((loss_d.item(), loss_g.item()))
    return losses, generator.state_dict(), discriminator.state_dict()


def gan(rank: int, size: int, axis: str) -> Result:
    """The same loop with two sessions. The generator's loss goes through the discriminator, whose gradients are thrown
    away by the next `zero_grad`."""
    generator, discriminator = model(5, 4), model(4, 1, seed=1)
    template_g = torch.optim.Adam(generator.parameters(), lr=0.02)
    template_d = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9)
    plan = plan_of(axis, size)
    session_g = mw.parallelize(generator, template_g, plan=plan, device="cpu")
    session_d = mw.parallelize(discriminator, template_d, plan=plan, device="cpu")
    losses = []
    batches = session_d.prepare(shuffled(pairs()))
    for _ in range(2):
        for noise, real in batches:
            fake = session_g.model(noise)
            local = F.softplus(-session_d.model(real)).mean() + F.softplus(session_d.model(fake.detach())).mean()
            loss_d = session_d.mean(local)
            session_d.optimizer.zero_grad()
            session_d.backward(loss_d)
            session_d.optimizer.step()
            loss_g = session_g.mean(F.softplus(-session_d.model(fake)).mean(), batches.samples)
            session_g.optimizer.zero_grad()
            session_g.backward(loss_g)
            session_g.optimizer.step()
            losses.append((loss_d.item(), loss_g.item()))
    assert (session_g.steps, session_d.steps) == (8, 8)
    return losses, session_g.state_dict(), session_d.state_dict()


def plain_student() -> tuple[list[float], dict[str, Tensor]]:
    teacher, student = model(5, 4), model(5, 4, seed=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
    losses = []
    for inputs, target in shuffled(pairs()):
        with torch.no_grad():
            soft = teacher(inputs).softmax(1)
        output = student(inputs)
        loss = F.kl_div(output.log_softmax(1), soft, reduction="batchmean") + F.mse_loss(output, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, student.state_dict()


def student_of(rank: int, size: int, axis: str) -> tuple[list[float], dict[str, Tensor]]:
    teacher = mw.parallelize(model(5, 4).requires_grad_(False), plan=plan_of(axis, size), device="cpu")
    module = model(5, 4, seed=1)
    template = torch.optim.AdamW(module.parameters(), lr=0.02)
    student = mw.parallelize(module, template, plan={"axes": {axis: size}}, device="cpu")
    losses = []
    for inputs, target in student.prepare(shuffled(pairs())):
        with torch.no_grad():
            soft = teacher(inputs).softmax(1)
        output = student(inputs)
        loss = student.mean(F.kl_div(output.log_softmax(1), soft, reduction="batchmean") + F.mse_loss(output, target))
        student.backward(loss)
        student.clip_gradients(0.5)
        student.optimizer.step()
        student.optimizer.zero_grad()
        losses.append(loss.item())
    return losses, student.state_dict()


def on_ranks(function: Any, size: int, axis: str) -> list[Any]:
    """The results of all ranks. The ranks of the pools have made their process group themselves."""
    return [function(0, 1, axis)] if size == 1 else run_ranks(function, size, axis)


# Two ranks are a case of the soak: three ranks have shares of different sizes, too.
WORLDS = all_but(
    {(1, "replicate"), *((3, axis) for axis in AXES)},
    [(1, "replicate"), *((size, axis) for size in (2, 3) for axis in AXES)],
)


@pytest.mark.parametrize(("size", "axis"), WORLDS)
def test_a_gan_trains_as_on_one_process(size: int, axis: str) -> None:
    expected = plain_gan()
    for found in on_ranks(gan, size, axis):
        for ours, plain in zip(found, expected, strict=True):
            assert_close(ours, plain)


@pytest.mark.parametrize(("size", "axis"), WORLDS)
def test_a_student_learns_from_its_teacher_as_on_one_process(size: int, axis: str) -> None:
    expected = plain_student()
    for found in on_ranks(student_of, size, axis):
        for ours, plain in zip(found, expected, strict=True):
            assert_close(ours, plain)


@pytest.mark.soak
def test_several_models_share_the_process_group_that_the_first_one_makes() -> None:
    found = mw.launch(lambda: gan(0, 2, "shard"), ranks=2, device="cpu")
    for ours, plain in zip(found, plain_gan(), strict=True):
        assert_close(ours, plain)
